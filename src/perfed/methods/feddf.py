"""FedDF: the server's model learns what the clients' models together say of unlabelled public samples.

Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning. NeurIPS 2020.
https://arxiv.org/abs/2006.07242 After the authors' code (https://github.com/epfml/federated-learning-public-code).

Clients train as FedAvg's do. Their mean is the student, one for each network where those differ, and the models of all
are its teachers: Adam with a rate that falls along a cosine and gradients of length 5 at most brings the student's
probabilities nearer to theirs (KL). Logits are averaged; `avg_probs`, and with it `avg_losses` (the code's default, of
the same gradient), fails where every client is sure of its own few classes.

The mean is weighted by samples, in the code it is uniform. The code stops by accuracy on labelled samples of the server
and takes the best student; here the number of steps is set. What teachers say is computed once a round, as public
samples do not change. Models are read one by one: no secure sums. `drop_worst` needs labels and leaves out of mean and
teachers who is below 1.2 times chance, or else 1.5 standard deviations below the others; the code, as teachers alone.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.optim import adam, adam_start
from perfed.methods.shared.distillation import of_outputs


@dataclass(frozen=True)
class FedDF(Method):
    distil_steps: int = hyper(200, "steps of the server in a round; 0 is FedAvg", at_least=0, at_most=1_000_000, toy=4)
    distil_lr: float = hyper(1e-3, "learning rate of the server's Adam at first", above=0)
    distil_batch: int = hyper(128, "public samples per step", at_least=1, at_most=1_000_000_000, toy=8)
    ensemble: Literal["avg_logits", "avg_losses", "avg_probs"] = hyper("avg_logits", "how teachers are put together")
    drop_worst: bool = hyper(False, "leave out models that are bad at labelled public samples")

    evaluates = "global"
    category = "personalised models: knowledge distillation"
    averages = False
    own_networks = True
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = "unlabelled"

    @property
    def reads_labels(self):
        return self.drop_worst

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"feddf compares probabilities of classes, and this task is {task.kind}")

    def init_server(self, clients):
        return torch.stack([model.init(self.context.seed) for model in self.networks])

    def broadcast(self, server, ids):
        return Down(shared=server[0]) if len(server) == 1 else Down(own=server[self.network_of[ids]])

    def global_model(self, server):
        return Method.global_model(self, server[0])  # which refuses where there are several

    def local(self, client, down, data):
        return client, Up(own={"w": self.descend(self.personalise(client, down, data), data), "samples": data.size})

    def means(self, server, cohort, kept):
        """Return for each network the mean of its clients' models; that of before where none of them stays."""
        numbers = torch.arange(len(server), device=server.device)[:, None]
        share = (self.network_of[cohort.ids] == numbers) * cohort.own["samples"].double() * kept  # [networks, models]
        total = share.sum(1, keepdim=True)
        return torch.where(total > 0, (share / total.clamp_min(1) @ cohort.own["w"].double()).to(server.dtype), server)

    def aggregate(self, server, cohort):
        return self.means(server, cohort, 1.0)

    def says(self, batch, w):
        out = self.model.apply(w, batch.x)[0]
        return out, out.argmax(-1) == batch.y

    def kept(self, right):
        """Return who stays, 1 or 0, given the share of public samples that each model is right about."""
        others = right.sort().values[: max(len(right) - 1, 1)]  # without the best
        near = right >= others.mean() - 1.5 * others.std(correction=0) - 1e-9
        above = right >= 1.2 / self.model.outputs
        return torch.where(above.all(), near, above | ~above.any()).double()

    def divergence(self, out, target):
        return F.kl_div(out.log_softmax(-1), target, reduction="none").sum(-1)

    def distil(self, carry, batch, target):
        w, state = carry
        g, w, _ = self.model.grad(w, batch, of_outputs(self.model, self.divergence, target))
        rate = self.distil_lr * (1 + torch.cos(math.pi / max(self.distil_steps, 1) * state[2])) / 2
        return adam(w, state, g * (5 / (g.norm() + 1e-6)).clamp_max(1), rate)

    def refine(self, server, cohort, public):
        of = self.network_of[cohort.ids].tolist()
        teachers = [(self.with_network(k), w) for k, w in zip(of, cohort.own["w"], strict=True)]
        answers = [public.map(method.says, w) for method, w in teachers]
        outputs, right = (torch.stack(each) for each in zip(*answers, strict=True))  # a row for each model
        kept = self.kept(right.double().mean(1)) if self.drop_worst else torch.ones_like(right[:, 0]).double()
        server, share = self.means(server, cohort, kept), (kept / kept.sum()).to(outputs.dtype)
        mean = lambda rows: torch.tensordot(share, rows, 1)
        target = mean(outputs).softmax(-1) if self.ensemble == "avg_logits" else mean(outputs.softmax(-1))
        about = {"steps": self.distil_steps, "batch_size": self.distil_batch}
        taught = lambda k, w: public.fold(self.with_network(k).distil, (w, adam_start(w)), target, **about)[0]
        return torch.stack([taught(k, w) if k in of else w for k, w in enumerate(server)])

    def personalise(self, client, down, data):
        return down.shared if len(self.networks) == 1 else down.own
