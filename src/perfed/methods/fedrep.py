"""FedRep: the body is shared, the head stays with the client; first the head is trained, then the body.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning. ICML
2021, Algorithm 1. https://arxiv.org/abs/2102.07078

The head takes `head_epochs` (tau_h) on the received body, then the body takes `epochs` under the new, fixed head (the
paper: a single update). A frozen part gets no gradient, momentum, decay or statistics. Bodies are averaged with sample
counts (the paper and the authors' code: uniformly). The authors' code trains all heads once more before the final
evaluation (10 epochs or more): `final_head_epochs`, by default none, or the numbers would not compare with other
methods'. These epochs are for the evaluation alone: a client keeps the head of its last round.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method

HEAD = 1  # stream of the head's batches; the body's are those of the other methods


@dataclass(frozen=True)
class FedRep(Method):
    head_epochs: int = hyper(
        10, "epochs tau_h of the head, before the body's; 0 is FedBABU's training", at_least=0, at_most=10_000
    )
    final_head_epochs: int = hyper(
        0, "epochs of the head alone before a model is evaluated", at_least=0, at_most=10_000
    )

    evaluates = "assembled"
    category = "personalised models: parameter decoupling"

    @property
    def sent(self):
        return self.model.body

    def init_server(self, clients):
        return self.sent.take(self.model.init(self.context.seed))

    def init_client(self):
        return self.model.head.take(self.model.init(self.context.seed))

    def join(self, head, body):
        return self.model.head.put(self.model.body.put(self.model.init(self.context.seed), body), head)

    def local(self, client, down, data):
        w = self.descend(self.join(client, down.shared), data, only="head", epochs=self.head_epochs, stream=HEAD)
        w = self.descend(w, data, only="body")
        return self.model.head.take(w), Up(mean=self.sent.take(w) - down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        w = self.join(client, down.shared)
        if not self.final_head_epochs:
            return w
        return self.descend(w, data, only="head", epochs=self.final_head_epochs, stream=HEAD)
