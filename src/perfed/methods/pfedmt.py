"""pFedMT: a global, a team and a device model; each follows the tier below and is the centre that pulls it.

Banerjee, Yurtsever, Bhuyan: Personalized Multi-tier Federated Learning. Workshop on Federated Learning, NeurIPS 2022,
Algorithm 1; later version, as PerMFL: https://arxiv.org/abs/2407.14251

Line 12 of the listing prints (1 - beta gamma) x + beta wbar, a slip for beta gamma wbar, which eq. 4 derives and the
authors' code has: with gamma = 0.1, beta = 1 the printed form multiplies the model by 1.9 in every round. A team starts
each round from x (eq. 7), a device each exchange from w_i (eq. 10). A team without participants keeps its w_i, which
still enters wbar, as in the code. Weights are uniform, as in objective and code; the text weights by samples (here: of
those who took part last). Running statistics are averaged, not stepped. A round is K times the work of FedAvg's.
`down` and `up` are between devices and teams, `extra` between teams and cloud; `team` in results is w_i, `global` x.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import SELECT, derive, shuffle
from perfed.core.rounds import Phase


@dataclass(frozen=True)
class PFedMT(Method):
    teams: int = hyper(2, "teams M; client i of N is in team i M // N (data.team_order)", at_least=1, at_most=1_000_000)
    lam: float = hyper(0.2, "pull lambda of a device towards its team", at_least=0)
    gamma: float = hyper(0.05, "pull gamma of a team towards the global model", above=0)
    eta: float = hyper(4.0, "team step eta; w keeps 1 - eta (lambda + gamma) of itself", above=0)
    beta: float = hyper(20.0, "global step beta; x keeps 1 - beta gamma of itself", above=0)
    K: int = hyper(2, "team iterations per round, each one exchange", at_least=1, at_most=10_000)
    L: int = hyper(0, "local steps per team iteration; 0: those of `epochs` epochs", at_least=0, at_most=1_000_000)
    weights: Literal["uniform", "samples"] = hyper("uniform", "weights of devices in a team, and of teams")
    team_share: float = hyper(1.0, "share of the teams that take part in a round", above=0, at_most=1)

    category = "personalised models: hierarchical"
    averages = False

    def check(self):
        if max(self.eta * (self.lam + self.gamma), self.beta * self.gamma) > 1 + 1e-9:
            raise Problem("pfedmt needs eta * (lam + gamma) and beta * gamma of at most 1, or models leap over means")
        if self.lr * self.lam >= 2:
            raise Problem(f"pfedmt needs lr * lam below 2, not {self.lr * self.lam:g}: the pull alone would diverge")

    @property
    def groups(self):
        return self.teams

    def init_server(self, clients):
        if self.teams > clients:
            raise Problem(f"pfedmt cannot make {self.teams} teams of {clients} clients")
        x, M = self.model.init(self.context.seed), self.teams
        team, n = torch.arange(clients, device=x.device) * M // clients, x.new_zeros(M, dtype=torch.float64)
        return {"x": x, "w": x.repeat(M, 1), "team": team, "n": n, "here": n > 0, "k": 0}

    def init_client(self):
        return self.model.init(self.context.seed)  # theta

    def phase(self, server):
        return Phase(exchanges=self.K)

    def cohort_of(self, server, info):
        ids, M = info.draw(), self.teams
        team = [id * M // len(server["team"]) for id in ids]
        order = shuffle(derive(self.context.seed, SELECT, int(server["k"]))[None], torch.tensor([M]), M)[0].tolist()
        chosen = [i for i in order if i in team][: max(1, int(self.team_share * M + 1e-9))]
        return [id for id, i in zip(ids, team, strict=True) if i in chosen]

    def begun(self, server):  # the team models of this exchange: the first of a round starts from x
        return server["w"] if server["k"] % self.K else server["x"].expand_as(server["w"])

    def broadcast(self, server, ids):
        team = server["team"][ids]
        return Down(own={"w": self.begun(server)[team], "team": team})

    def show(self, server, ids):
        return Down(shared=server["x"], own={"w": server["w"][server["team"][ids]]})

    def newcomer(self, server):
        return Down(shared=server["x"], own={"w": server["x"], "team": torch.zeros_like(server["team"][0])})

    def pulled(self, theta, batch, w):
        g, fresh = self.gradient(theta, batch)
        return g + self.lam * self.pull(theta, w), fresh

    def local(self, client, down, data):
        w = down.own["w"]
        theta = self.descend(w, data, self.pulled, w, steps=self.L or None)
        weight = 1.0 if self.weights == "uniform" else None
        return theta, Up(mean=theta - w, group=down.own["team"], weight=weight)

    def aggregate(self, server, cohort):
        x, w, k, here = server["x"], self.begun(server), int(server["k"]) + 1, cohort.weight > 0
        step = self.eta * (self.lam * cohort.mean - self.gamma * self.pull(w, x))
        w = torch.where(here[:, None], w + self.model.weights.only(step, cohort.mean), server["w"])
        n = torch.where(here, cohort.weight, server["n"])
        if k % self.K == 0:
            tau = torch.ones_like(n) if self.weights == "uniform" else n
            step = (tau / tau.sum()).to(w.dtype) @ w - x
            x = x + self.model.weights.only(self.beta * self.gamma * step, step)
        return {"x": x, "w": w, "team": server["team"], "n": n, "here": here, "k": k}

    def extra_traffic(self, server):
        return {f"cloud_{way}": int(server["here"].sum()) * self.model.size for way in ("down", "up")}

    def personalise(self, client, down, data):
        return {"personal": client, "team": down.own["w"], "global": down.shared}
