"""FedAlt: any part of the model stays with the client, the rest is shared; the personal part moves first.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao: Federated Learning with Partial Model Personalization. ICML 2022,
Algorithms 1 and 2. https://arxiv.org/abs/2204.03809

v takes `personal_epochs` under the received u, then u takes `epochs` under the new v, each with its own optimiser and
learning rate; what is frozen gets no gradient, momentum, decay or statistics. With the head as v and one rate this is
FedRep. Averages with sample counts, the authors' code with numbers of batches; its penalty on v, stateless clients,
pre-training and final tuning of v are left out.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedrep import HEAD
from perfed.methods.fedsim import FedSim


@dataclass(frozen=True)
class FedAlt(FedSim):
    personal_epochs: int = hyper(
        10, "epochs tau_v of the personal part v; the shared u takes `epochs`", at_least=0, at_most=10_000
    )

    def local(self, client, down, data):
        w = self.join(client, down)
        w = self.descend(w, data, only=self.personal, epochs=self.personal_epochs, stream=HEAD)
        w = self.descend(w, data, only="!" + self.personal)
        return self.kept.take(w), Up(mean=self.sent.take(w) - down.shared)
