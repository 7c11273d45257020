"""HeurFedAMP: FedAMP with the cosine of two models in place of their distance, and a fixed weight on one's own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data. AAAI 2021,
the section on HeurFedAMP. https://arxiv.org/abs/2007.03797

xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)), cosines over parameters only.
`share` is 1 - xi_ii: others weigh exactly as much, while in FedAMP it is a bound. What FedAMP's file says of the pull,
of the start and of clients that sit out holds here.
"""

from dataclasses import dataclass

import torch

from perfed.core.fields import hyper
from perfed.methods.fedamp import FedAMP


@dataclass(frozen=True)
class HeurFedAMP(FedAMP):
    sigma: float = hyper(10.0, "sharpness sigma of exp(sigma cos); 0 weighs all others alike", at_least=0)
    share: float = hyper(0.5, "what others weigh in u_i, 1 - xi_ii", at_least=0, at_most=1)

    def init_server(self, clients):
        return {"models": self.model.init(self.context.seed).repeat(clients, 1)}

    def attention(self, server, ids):
        w = torch.nn.functional.normalize(self.model.weights.only(server["models"]), dim=1)
        self_at = torch.arange(len(w), device=ids.device) == ids[:, None]
        return self.share * (self.sigma * w[ids] @ w.T).masked_fill(self_at, -torch.inf).softmax(1).nan_to_num()

    def aggregate(self, server, cohort):
        return {"models": server["models"].index_copy(0, cohort.ids, cohort.own)}

    def notes(self, server):
        return {}
