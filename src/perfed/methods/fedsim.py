"""FedSim: any part of the model stays with the client, the rest is shared; both move at once in every step.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao: Federated Learning with Partial Model Personalization. ICML 2022,
Algorithms 1 and 3. https://arxiv.org/abs/2204.03809

u is what is shared and v what is personal; each has its own learning rate, as in the paper (the authors' code has one).
With the head as v and one rate this is FedPer. Averages with sample counts, the authors' code with numbers of batches;
its penalty on v, stateless clients and pre-training are left out. Running statistics belong to the part of their layer.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.method import Method
from perfed.methods.fedper import FedPer


@dataclass(frozen=True)
class FedSim(FedPer):
    personal: str = hyper("head", "the personal part v: head, body, norm or a pattern; 'none' is FedAvg")
    personal_rate: float = hyper(1.0, "learning rate of v as a multiple of u's: gamma_v / gamma_u", above=0)

    def update(self, theta, state, g, only=None, model=None):
        moved, state = Method.update(self, theta, state, g, only, model)
        return self.kept.only(theta + self.personal_rate * (moved - theta), moved), state
