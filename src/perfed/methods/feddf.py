"""FedDF: the server's model learns what the clients' models together say of unlabelled public samples.

Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning. NeurIPS 2020,
Algorithm 1. https://arxiv.org/abs/2006.07242
After the authors' code (https://github.com/epfml/federated-learning-public-code).

Clients train as FedAvg's do. Their mean is the student, and all of their models are teachers: Adam with a rate that
falls along a cosine and gradients of length 5 at most brings the student's probabilities nearer to theirs (KL). Logits
are averaged. `avg_probs`, and with it `avg_losses` (the code's default, whose gradient is the same), fails where every
client is sure of its own few classes.

The mean is weighted by samples, in the code it is uniform. The code stops by accuracy on labelled samples of the server
and takes the best student; here the number of steps is set. What teachers say is computed once a round, which is the
same, as public samples do not change. Clients' models are read one by one: secure sums do not apply. `drop_worst` needs
labelled public samples and leaves out, as start and as teacher, who is below 1.2 times chance, or if nobody is, 1.5
standard deviations below the others; the code drops the latter as teachers alone.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method
from perfed.core.model import average
from perfed.core.optim import adam, adam_start


@dataclass(frozen=True)
class FedDF(Method):
    distil_steps: int = hyper(200, "steps of the server in each round; 0 is FedAvg", at_least=0, at_most=1_000_000)
    distil_lr: float = hyper(1e-3, "learning rate of the server's Adam at first", above=0)
    distil_batch: int = hyper(128, "public samples per step", at_least=1, at_most=1_000_000_000)
    ensemble: Literal["avg_logits", "avg_losses", "avg_probs"] = hyper("avg_logits", "how teachers are put together")
    drop_worst: bool = hyper(False, "leave out models that are bad at labelled public samples")

    evaluates = "global"
    category = "personalised models: knowledge distillation"
    averages = False
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = "unlabelled"

    @property
    def reads_labels(self):
        return self.drop_worst

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"feddf compares probabilities of classes, and this task is {task.kind}")

    def init_server(self, clients):
        return self.model.init(self.context.seed)

    def local(self, client, down, data):
        return client, Up(own={"w": self.descend(down.shared, data), "samples": data.size})

    def mean(self, cohort, kept):
        share = cohort.own["samples"].double() * kept
        return (share / share.sum() @ cohort.own["w"].double()).to(self.model.dtype)

    def aggregate(self, server, cohort):
        return self.mean(cohort, 1.0)

    def logits(self, batch, w):
        return self.model.apply(w, batch.x)[0]

    def label(self, batch, given):
        return batch.y

    def kept(self, right):
        """Return who stays, 1 or 0, given the share of public samples that each model is right about."""
        above = right >= 1.2 / self.model.outputs
        others = right.sort().values[: max(len(right) - 1, 1)]  # without the best
        near = right >= others.mean() - 1.5 * others.std(correction=0) - 1e-9
        stays = torch.where(above.all(), near, above)
        return torch.where(stays.any(), stays, True).double()

    def distil(self, carry, batch, target):
        def loss(w, batch, train):
            out, fresh = self.model.apply(w, batch.x, train, batch.weight, batch.key)
            each = F.kl_div(out.log_softmax(-1), target[batch.index], reduction="none").sum(-1)
            return average(each, batch.weight), fresh

        w, state = carry
        g, w, _ = self.model.grad(w, batch, loss)
        rate = self.distil_lr * (1 + torch.cos(math.pi / max(self.distil_steps, 1) * state[2])) / 2
        return adam(w, state, g * (5 / (g.norm() + 1e-6)).clamp_max(1), rate)

    def refine(self, server, cohort, public):
        outputs = torch.stack([public.map(self.logits, w) for w in cohort.own["w"]])  # [models, samples, classes]
        kept = outputs.new_ones(len(outputs), dtype=torch.float64)
        if self.drop_worst:
            kept = self.kept((outputs.argmax(-1) == public.map(self.label)).double().mean(1))
            server = self.mean(cohort, kept)
        share = (kept / kept.sum()).to(outputs.dtype)
        by_logits = self.ensemble == "avg_logits"
        target = torch.tensordot(share, outputs if by_logits else outputs.softmax(-1), 1)
        about = {"steps": self.distil_steps, "batch_size": self.distil_batch}
        start = (server, adam_start(server))
        return public.fold(self.distil, start, target.softmax(-1) if by_logits else target, **about)[0]

    def personalise(self, client, down, data):
        return down.shared
