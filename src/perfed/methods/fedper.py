"""FedPer: the body is shared, the head stays with the client; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019.
https://arxiv.org/abs/1912.00818

Evaluated as the latest body with the client's own head; a client that was never chosen has the initial head.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method


@dataclass(frozen=True)
class FedPer(Method):
    personal: str = hyper("head", "what stays with the client: head, body, norm or a pattern; 'none' is FedAvg")

    evaluates = "assembled"
    category = "personalised models: parameter decoupling"

    def check(self):
        self.model.part(self.personal)  # refuses a pattern that matches nothing

    @property
    def kept(self):
        return self.model.part(self.personal)

    @property
    def sent(self):
        return self.model.part("!" + self.personal)

    def init_server(self, clients):
        return self.sent.take(self.model.init(self.context.seed))

    def init_client(self):
        return self.kept.take(self.model.init(self.context.seed))

    def join(self, client, down):
        return self.kept.put(self.sent.put(self.model.init(self.context.seed), down.shared), client)

    def local(self, client, down, data):
        w = self.descend(self.join(client, down), data)
        return self.kept.take(w), Up(mean=self.sent.take(w) - down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        return self.join(client, down)
