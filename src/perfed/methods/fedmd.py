"""FedMD: clients tell each other what they make of public samples, learn from the mean of it, and send no model.

Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation. 2019. https://arxiv.org/abs/1910.03581
After the authors' code (https://github.com/diogenes0319/FedMD_clean).

Every client may have a network of its own. At first it learns the labelled public samples, then its own. In a round
all say what they make of the public samples (logits in evaluation mode, before they learn anything new); each brings
its logits nearer to the plain mean, then trains on its own samples. Logits of classes that no public sample has count
as all others: they carry what clients know of each other's classes.

The authors take 5,000 public samples drawn anew for each round; here all are taken, so hold out as many as a round is
to have. They stop the first training by accuracy on TEST samples; here its length is set. Adam on the mean logits goes
on from round to round, as theirs does; a client's own training is the run's, which begins anew in each. The gradient of
absolute differences does not shrink near the mean: keep `public_lr` small, or take `squared`. A newcomer learns as the
others did at first, then the last mean, and says nothing.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.optim import adam, adam_start
from perfed.core.rounds import Phase
from perfed.methods.shared.distillation import of_outputs


@dataclass(frozen=True)
class FedMD(Method):
    public_epochs: int = hyper(20, "epochs on labelled public samples, at first", at_least=0, at_most=10_000, toy=2)
    private_epochs: int = hyper(25, "epochs on a client's own samples after them", at_least=0, at_most=10_000, toy=2)
    digest_epochs: int = hyper(1, "epochs a round towards the mean logits; 0: none", at_least=0, at_most=10_000)
    distance: Literal["absolute", "squared"] = hyper("absolute", "difference from the mean logits, in the mean")
    public_lr: float = hyper(1e-3, "learning rate of Adam on public samples", above=0)
    public_batch: int = hyper(32, "public samples per step", at_least=1, at_most=1_000_000_000, toy=5)

    evaluates = "own"
    category = "personalised models: knowledge distillation"
    averages = False
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = "labelled"
    sends_public: ClassVar[bool] = True
    own_networks = True

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"fedmd exchanges logits of classes, and this task is {task.kind}")

    def init_server(self, clients):
        shape = self.context.public, self.model.outputs
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)  # the mean logits

    def init_client(self):
        theta = self.model.init(self.context.seed)
        return {"theta": theta, "adam": adam_start(theta)}

    def phase(self, server):
        return Phase("talk", exchanges=2, first="prepare")

    def broadcast(self, server, ids):
        return Down(shared=server) if self.context.exchange == 1 else Down()

    def newcomer(self, server):
        return Down(shared=server)

    def learn(self, carry, batch, given):
        theta, state = carry
        g, theta = self.gradient(theta, batch)
        return adam(theta, state, g, self.public_lr)

    def apart(self, out, consensus):
        return ((out - consensus).abs() if self.distance == "absolute" else (out - consensus) ** 2).mean(-1)

    def digest(self, carry, batch, consensus):
        theta, state = carry
        g, theta, _ = self.model.grad(theta, batch, of_outputs(self.model, self.apart, consensus))
        return adam(theta, state, g, self.public_lr)

    def logits(self, batch, theta):
        return self.model.apply(theta, batch.x)[0]

    def local_prepare(self, client, down, data):
        theta, batch = client["theta"], self.public_batch
        theta, _ = data.public.fold(self.learn, (theta, adam_start(theta)), epochs=self.public_epochs, batch_size=batch)
        return {**client, "theta": self.descend(theta, data, epochs=self.private_epochs)}, Up()

    def local_talk(self, client, down, data):
        if self.context.exchange == 0:
            return client, Up(mean=data.public.map(self.logits, client["theta"]), weight=1.0)
        return self.local(client, down, data)

    def local(self, client, down, data):
        carry, about = (
            (client["theta"], client["adam"]),
            {"epochs": self.digest_epochs, "batch_size": self.public_batch},
        )
        theta, state = data.public.fold(self.digest, carry, down.shared, **about)
        return {"theta": self.descend(theta, data), "adam": state}, Up()

    def aggregate(self, server, cohort):
        return cohort.mean if self.context.exchange == 0 else server

    def personalise(self, client, down, data):
        return client["theta"]
