"""FedBABU: the body alone is trained and averaged under a fixed random head; clients tune the whole afterwards.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022, Algorithm 1.
https://arxiv.org/abs/2106.06042

The head is the common random initial one in every round (its learning rate is 0: no momentum, no decay), and tuning
starts from it; the PGFed paper's code hands out a head of zeros instead. The head follows from the seed, so it is never
sent. Tuning uses training data and a fresh optimiser, and is discarded after the evaluation; its learning rate is small
(the authors' is the last of a schedule from 0.1 to 0.001): at the rounds' rate it spoils what the body has learned.
`global` in the results is the model before tuning, the paper's initial accuracy. Bodies are averaged with sample counts
(the authors' code: uniformly).
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method


@dataclass(frozen=True)
class FedBABU(Method):
    adapt_epochs: int = hyper(
        5, "epochs tau_f of body and head before an evaluation; 0 evaluates as is", at_least=0, at_most=10_000
    )
    adapt_lr: float = hyper(0.01, "learning rate of these epochs", above=0)

    evaluates = "adapted"
    category = "personalised models: parameter decoupling"

    @property
    def sent(self):
        return self.model.body

    def init_server(self, clients):
        return self.sent.take(self.model.init(self.context.seed))

    def join(self, body):
        return self.model.body.put(self.model.init(self.context.seed), body)

    def local(self, client, down, data):
        w = self.descend(self.join(down.shared), data, only="body")
        return client, Up(mean=self.sent.take(w) - down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        w, tuner = self.join(down.shared), self.at_rate(self.adapt_lr)
        return {"personal": tuner.descend(w, data, epochs=self.adapt_epochs), "global": w}
