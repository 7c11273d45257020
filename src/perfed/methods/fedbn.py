"""FedBN: FedAvg over everything but the normalisation layers, which stay with the client.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021,
Algorithm 1. https://arxiv.org/abs/2102.07623

Layers are found by type, not by the name 'bn', and their running statistics stay with their parameters. A model without
such layers is refused: the method would be FedAvg. `personal` may name a part of them: '*.running_*' is SiloBN.
Averages with sample counts, the authors' code uniformly. A client that was never chosen has the initial statistics;
`fine_tune` measures them. Made for clients whose inputs differ, less for those whose labels do.
"""

from dataclasses import dataclass

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.methods.fedper import FedPer


@dataclass(frozen=True)
class FedBN(FedPer):
    personal: str = hyper("norm", "what stays with the client: norm, or a pattern of names within those layers")

    def check(self):
        if not len(self.model.norm):
            raise Problem("fedbn needs a model with normalisation layers: without them it is fedavg")
        outside = self.kept.mask & ~self.model.norm.mask
        if outside.any() or not self.kept.mask.any():
            raise Problem(f"fedbn keeps normalisation layers, not '{self.personal}': fedper keeps any part")
