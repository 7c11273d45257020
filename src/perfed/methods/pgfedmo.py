"""PGFedMo: PGFed whose clients smooth the gradient they receive of the others' risks over their rounds.

Luo, Mendieta, Chen, Wu: PGFed: Personalize Each Client's Global Objective for Federated Learning. ICCV 2023,
Algorithm 1 with momentum, eq. 15. https://arxiv.org/abs/2212.01448

gtilde_i <- (1 - beta) received + beta stored, kept at the client; the first gradient received is stored unscaled, as
in the authors' code. That code reads beta only under the name PGFedMo, which its command line refuses: as released it
runs plain PGFed. The smoothed gradient moves theta only; alpha moves as in PGFed.
"""

from dataclasses import dataclass

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Down
from perfed.methods.pgfed import PGFed


@dataclass(frozen=True)
class PGFedMo(PGFed):
    beta: float = hyper(0.5, "momentum beta of the others' gradient; 0 is PGFed", at_least=0, below=1)

    def init_client(self):
        return {**PGFed.init_client(self), "gtilde": self.model.zeros()}  # 0: nothing received yet

    def local(self, client, down, data):
        stored, received = client["gtilde"], down.own["mixed"]
        gtilde = torch.where(stored.any(), (1 - self.beta) * received + self.beta * stored, received)
        state, up = PGFed.local(self, client, Down(down.shared, {**down.own, "mixed": gtilde}), data)
        return {**state, "gtilde": gtilde}, up
