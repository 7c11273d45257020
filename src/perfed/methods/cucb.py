"""Class-imbalance bandit: the server guesses clients' classes from their models, and picks cohorts that balance them.

After the description of Yang, Wong, Zhu, Fang, Wang: Federated Learning with Class Imbalance Reduction. EUSIPCO 2021.
https://arxiv.org/abs/2011.11266

The server reads every client's model by itself, so there is no secure sum. On labelled public samples, G_y is the
squared length of the gradient of class y's mean loss in row y of the head: small where the client holds the class. A
client's composition R is the mean of its estimates, old ones less by `rho`. At first everybody is asked once. Then a
cohort begins with the largest 1 / KL(R, uniform) plus a bonus for who was seldom asked, and takes whoever brings the
sum of all R nearest to uniform. That can starve clients (`visits`: the least and the most), and a cohort that cannot
hold all classes is nearly always the same. Our own choices: R_y ~ exp(b / G_y) as described is almost one-hot (`raw`),
so G is taken in units of the smallest; `inverse_root` is R_y ~ G_y^-1/2, `oracle` a control whose clients tell their
shares. Sums are weighted by samples, 1 / KL is divided by its largest; a class without public samples is nobody's.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.model import average
from perfed.core.random import COHORT, choose, derive
from perfed.methods.shared.balance import grown, unevenness


@dataclass(frozen=True)
class CUCB(Method):
    b: float = hyper(3.0, "sharpness b of the compositions that are guessed", above=0)
    rho: float = hyper(0.99, "what an estimate keeps of its weight when a newer one comes", above=0, at_most=1)
    bonus: float = hyper(0.2, "weight a of the bonus for clients that were seldom asked", at_least=0)
    estimate: Literal["scaled", "raw", "inverse_root", "oracle"] = hyper("scaled", "how R follows from G")

    evaluates = "global"
    category = "global model: client selection"
    averages = False
    public = "labelled"

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"cucb balances classes, which only classification has, and this task is {task.kind}")
        head = self.model.module(self.model.init(self.context.seed)).get_submodule(self.model.head_name)
        if not isinstance(head, nn.Linear):
            kind = type(head).__name__
            raise Problem(f"cucb reads the rows of a linear head, and '{self.model.head_name}' is {kind}")

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        R = torch.zeros(clients, self.model.outputs, dtype=torch.float64, device=w.device)  # sums of estimates
        return {"w": w, "R": R, "visits": R.sum(1).long()}

    def cohort_of(self, server, info):
        m, round, visits = self.context.cohort, self.context.round, server["visits"].cpu()
        new, known = ([id for id in info.available if bool(visits[id]) == met] for met in (False, True))
        if len(new) >= m:
            return [new[place] for place in choose(derive(self.context.seed, COHORT, round), m, len(new))]
        R = F.normalize(server["R"].cpu(), p=1, dim=1)
        if known and not new:
            kl, seldom = unevenness(R[known]), (1.5 * math.log(round) / visits[known]).sqrt()
            new = [known.pop(int(((kl.min() + 1e-12) / (kl + 1e-12) + self.bonus * seldom).argmax()))]
        return grown(R * torch.tensor(info.sizes)[:, None], new, known, m)

    def broadcast(self, server, ids):
        return Down(shared=server["w"])

    def shares(self, batch, given):
        return average(F.one_hot(batch.y, self.model.outputs).to(self.model.dtype), batch.weight)

    def local(self, client, down, data):
        own = {"w": self.descend(down.shared, data), "samples": data.size}
        return client, Up(own=own | ({"R": data.mean(self.shares)} if self.estimate == "oracle" else {}))

    def aggregate(self, server, cohort):
        n, w = cohort.own["samples"].double(), server["w"]
        return server | {"w": w + (n / n.sum()).to(w.dtype) @ (cohort.own["w"] - w)}

    def slopes(self, batch, w):
        """Return for each class y its share, and that much of the gradient of its loss in row y of the head."""
        out, z, _ = self.model.features(w, batch)
        of = F.one_hot(batch.y, self.model.outputs).to(out.dtype)
        error = of * (out.softmax(1) - 1)
        return average(of, batch.weight), average(error[:, :, None] * z[:, None], batch.weight)

    def composition(self, w, public):
        share, slope = public.mean(self.slopes, w, chunk=64)
        G = (slope / share[:, None]).square().sum(1).nan_to_num(torch.inf).clamp_min(1e-12)
        if self.estimate == "inverse_root":
            return F.normalize(G**-0.5, p=1, dim=0)
        return (self.b * (G.min() if self.estimate == "scaled" else 1) / G).softmax(0)

    def refine(self, server, cohort, public):
        own, ids = cohort.own, cohort.ids
        new = own["R"] if self.estimate == "oracle" else torch.stack([self.composition(w, public) for w in own["w"]])
        R, visits = self.rho * server["R"][ids] + new.double(), server["visits"][ids] + 1
        return server | {"R": server["R"].index_copy(0, ids, R), "visits": server["visits"].index_copy(0, ids, visits)}

    def personalise(self, client, down, data):
        return down.shared

    def global_model(self, server):
        return server["w"]

    def notes(self, server):
        return {"visits": [int(server["visits"].min()), int(server["visits"].max())]}
