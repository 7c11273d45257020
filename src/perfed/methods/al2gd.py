"""AL2GD: clients of known clusters are pulled to their cluster's mean and, more weakly, to that of all, by coins.

After the description of Lyu, Hanzely, Kolar: Personalized Federated Learning with Multiple Known Clusters. 2022.
https://arxiv.org/abs/2204.13619

The objective is derived from the moves: the sum of f_i(t_i) and gamma/2 |t_i - c_j|^2, and of lambda/2 |c_j - c|^2 for
each cluster, least in all c. With a = lambda / (lambda + gamma n_j) its gradient pulls t_i by gamma (1 - a) to its
cluster's mean, and by gamma a to that of those means, whose weights are a n_j. In each step a coin of all decides for a
global move (p0), else one of each cluster for a move to its mean (p) or a local step. gamma is `lam`, as in L2GD, and
lambda `between`. A third party's code multiplies by probabilities, and leaves out the means.

Between two global moves clusters do not know of each other. So a round is a turn of each, its moves and its local steps
until the next one, and who has no more waits for the others. That is AL2GD exactly.
"""

from dataclasses import dataclass

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.random import SELECT, derive
from perfed.core.rounds import Phase
from perfed.methods.l2gd import L2GD
from perfed.methods.shared.coins import turns

ENDLESS = 2**31  # steps


@dataclass(frozen=True)
class AL2GD(L2GD):
    clusters: int = hyper(2, "clusters M; i of N is in i M // N (data.team_order)", at_least=1, at_most=1_000_000)
    between: float = hyper(0.1, "pull lambda of a cluster to the others; 0: each is alone", at_least=0)
    tau: float = hyper(0.0, "share of the pull to the cluster that is in global moves", at_least=0, at_most=1)
    p0: float = hyper(0.02, "probability of a global move; p is that of a cluster's, else", above=0, below=1, toy=0.2)

    category = "personalised models: clustering"
    averages = False

    @property
    def groups(self):
        return self.clusters

    def init_server(self, clients):
        if self.clusters > clients:
            raise Problem(f"al2gd cannot make {self.clusters} clusters of {clients} clients")
        t = self.model.init(self.context.seed)
        cluster = torch.arange(clients, device=t.device) * self.clusters // clients
        n = cluster.bincount().to(t)
        if (most := self.theta * float(self.pulls(n)[1].max())) > 1 + 1e-6:
            raise Problem(f"al2gd would leap over the mean of all by a pull of {most:.3g}: set p0 higher, or lam lower")
        return {"t": t.repeat(self.clusters, 1), "n": n, "cluster": cluster, "cycle": 0, "turn": 0}

    def pulls(self, n):
        """Return a of each cluster, and in units of theta how far clients move in a global move and in a cluster's."""
        a = self.between / (self.between + self.lam * n) if self.between else 0 * n
        return a, self.p * (1 - self.p0) / self.p0 * (a + self.tau * (1 - a)), (1 - self.tau) * (1 - a)

    def turns(self, server):
        """Return for each cluster its turns from one global move to the next: (moves, local steps)."""
        if self.coins == "fixed":
            return [[(1, ENDLESS)] * (1 + round((1 - self.p0) * self.p / self.p0))] * self.clusters
        return turns(derive(self.context.seed, SELECT, server["cycle"]), self.clusters, self.p0, self.p)

    def now(self, server):
        return [[*line, *[(0, 0)] * server["turn"]][server["turn"]] for line in self.turns(server)]

    def phase(self, server):
        return Phase(steps=None if self.coins == "fixed" else max(1, *(local for _, local in self.now(server))))

    def cohort_of(self, server, info):
        now, cluster = self.now(server), server["cluster"].tolist()
        return [id for id in info.draw() if now[cluster[id]][0]]

    def centres(self, server):
        """Return what each cluster moves to in this round, how far, and the mean of all clusters."""
        (a, of_all, of_cluster), t = self.pulls(server["n"]), server["t"]
        share, part = server["n"] * (a if self.between else 1), (a / (a + self.tau * (1 - a)).clamp_min(1e-30))[:, None]
        mean = share / share.sum() @ t
        return (t, of_cluster, mean) if server["turn"] else (t + part * (mean - t), of_all, mean)

    def broadcast(self, server, ids):
        j, (centre, pull, _) = server["cluster"][ids], self.centres(server)
        moves, steps = torch.tensor(self.now(server), device=ids.device)[j].unbind(1)
        return Down(own={"t": centre[j], "pull": pull[j], "moves": moves, "steps": steps, "j": j})

    def newcomer(self, server):  # of no known cluster: it begins at the mean of all
        j, pull = torch.zeros_like(server["cluster"][0]), torch.ones_like(server["n"][0])
        return Down(own={"t": self.centres(server)[2], "pull": pull, "moves": pull / 0, "steps": j + ENDLESS, "j": j})

    def step(self, carry, batch, steps):
        t, state, done = carry
        g, fresh = self.gradient(t, batch)
        moved, state = self.update(fresh, state, g)
        return torch.where(done < steps, moved, t), state, done + 1

    def local(self, client, down, data):
        to = down.own
        t = to["t"] + (1 - self.theta * to["pull"]) ** to["moves"] * (client - to["t"])
        t, *_ = data.fold(self.step, (t, self.start(t), torch.zeros_like(to["steps"])), to["steps"])
        return t, Up(mean=t - to["t"], group=to["j"], weight=1.0)

    def aggregate(self, server, cohort):
        t, turn = self.centres(server)[0] + cohort.mean, server["turn"] + 1
        t, over = torch.where(cohort.weight[:, None] > 0, t, server["t"]), turn == max(map(len, self.turns(server)))
        return server | {"t": t, "cycle": server["cycle"] + over, "turn": 0 if over else turn}

    def notes(self, server):
        return {"global_moves": server["cycle"]}
