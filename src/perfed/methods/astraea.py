"""Astraea: clients even the classes out, then mediators train balanced groups of clients one after another.

After the description of Duan, Liu, Chen, Liu, Tan, Liang: Self-Balancing Federated Learning With Global Imbalanced Data
in Mobile Edge Computing. IEEE TPDS 32(1), 2021. https://arxiv.org/abs/1907.01132

The first round is a survey: everybody sends its number of samples of each class, and nobody trains. Then, once, a class
whose z-score is below T_a gets copies, one above T_d loses samples, until its score is the geometric mean of the old
one and the threshold. The paper's T_d is 3.0 or 3.5, T_a = -1 / T_d; no score of ten is above 2.85, so here both are 1.
Images are copied turned, sheared, scaled or shifted, others as they are. A mediator takes up to g of the round's
clients, always the one with which its pooled classes, as they should be by then, are nearest to even; its model goes
from client to client, E_m times. The server averages these models by samples. Who fails is passed over.
"""

from dataclasses import dataclass
from math import ceil

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.rounds import Phase
from perfed.methods.shared.balance import balanced_teams, class_rates, copied, resampled


@dataclass(frozen=True)
class Astraea(Method):
    T_a: float = hyper(-1.0, "classes whose z-score is below this one get copies", at_most=0)
    T_d: float = hyper(1.0, "classes whose z-score is above this one lose samples", at_least=0)
    most: float = hyper(4.0, "copies that a class gets at most, for each of its samples", above=0, at_most=100)
    g: int = hyper(5, "clients of a mediator at most", at_least=1, at_most=1_000, toy=2)
    E_m: int = hyper(1, "passes of a mediator over its clients in a round", at_least=1, at_most=1_000)

    evaluates = "global"
    category = "global model: data augmentation"
    averages = False
    extends_in = "train"

    def check(self):
        if self.model.task.kind != "classification":
            raise Problem(f"astraea counts samples of classes, and this task is {self.model.task.kind}")

    def init_server(self, clients):
        w, M = self.model.init(self.context.seed), -(-self.context.cohort // self.g)
        place = torch.full((clients,), -1, device=w.device)  # g for each mediator, one after another; -1: none
        counts, n = w.new_zeros(clients, self.model.outputs), w.new_zeros(M, dtype=torch.float64)
        return {"w": w, "v": w.repeat(M, 1), "n": n, "place": place, "counts": counts, "R": 1 + counts[0]}

    def before_round(self, server, info):
        ids, place = info.draw(), torch.full_like(server["place"], -1)
        teams = balanced_teams(server["counts"][ids].cpu(), self.g)
        place[[ids[row] for team in teams for row in team]] = torch.arange(len(ids), device=place.device)
        return server | {"place": place, "v": server["w"].repeat(len(server["n"]), 1), "n": 0 * server["n"]}

    def phase(self, server):
        return (
            Phase("train", exchanges=self.g * self.E_m) if server["counts"].any() else Phase("survey", everybody=True)
        )

    def cohort_of(self, server, info):
        place = server["place"].cpu()
        turns = [(place >= 0) & (place % self.g == turn) for turn in range(self.g)]
        return [turn.nonzero().flatten().tolist() for turn in turns] * self.E_m

    def broadcast(self, server, ids):
        if self.context.phase == "train":
            return Down(shared=server["R"], own=server["v"][server["place"][ids] // self.g])
        return Down() if self.context.phase else Down(shared=server["w"])  # an evaluation is in no phase

    def newcomer(self, server):
        return Down(shared=server["w"], own=server["w"])

    def classes(self, batch, given):
        return torch.nn.functional.one_hot(batch.y, self.model.outputs)

    def local_survey(self, client, down, data):
        return client, Up(own=data.map(self.classes).sum(0).to(self.model.dtype))

    def copies(self, batch, given):
        return copied(batch, ceil(self.most))

    def extend(self, client, down, data):
        mine = data.map(self.copies)
        return resampled(**mine, rate=down.shared[mine["y"]], real=data.mask())

    def local(self, client, down, data):
        return client, Up(own={"v": self.descend(down.own, data), "samples": data.size})

    def aggregate(self, server, cohort):
        if self.context.phase == "survey":
            counts = server["counts"].index_copy(0, cohort.ids, cohort.own)
            R = class_rates(counts.sum(0), self.T_a, self.T_d).clamp_max(1 + self.most)
            return server | {"counts": counts * R, "R": R}
        m, own = server["place"][cohort.ids] // self.g, cohort.own
        v, n = server["v"].index_copy(0, m, own["v"]), server["n"].index_add(0, m, own["samples"].double())
        return server | {"w": (n / n.sum()).to(v.dtype) @ v, "v": v, "n": n}

    def personalise(self, client, down, data):
        return down.shared

    def global_model(self, server):
        return server["w"]

    def extra_traffic(self, server):  # each mediator gets a model, and gives one back
        M = int(server["place"].max()) // self.g + 1 if self.context.phase == "train" else 0
        return {f"mediators_{way}": M * self.model.sent for way in ("down", "up")}

    def notes(self, server):
        return {"class_rates": server["R"].tolist()}
