"""FedSAE: each client is given an easy and a hard task, so many epochs, which follow what it could do before.

Li, Duan, Liu, Zhang, Ren, Chen, Tan, Wang: FedSAE: A Novel Self-Adaptive Federated Learning Framework in Heterogeneous
Systems. IJCNN 2021. https://arxiv.org/abs/2104.07515

After the authors' code (a copy of it, https://github.com/yasar-rehman/FedSAE), with the rules that its comments state:
a client that can do H epochs does H, else L if it can do that, else nothing reaches the server, and both are halved.
There L is overwritten before H is made of it; in Fassa one client can succeed and drop out in the same round; clients
with a large loss are not preferred, for that is switched off; and the work has an upper limit, but not L and H. Here
that is `epochs` (there 15), for all three. Fassa's threshold rests on earlier rounds, two of them at least.

Our own choices: the loss is that of the model that a client received; who has not sent one yet counts with the largest.
What clients can do is a matter of the simulated machines (`[system]`); without a limit everybody does everything. Bytes
leave out a client's L, H and loss, and how far it came.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import SELECT, choose_by, derive
from perfed.core.rounds import Selection


def followed(L, H, full, failed, grow_L, grow_H):
    """Return the next tasks [clients] after the tasks L and H: `full` where H was done, `failed` where not even L."""
    easy, hard = torch.where(failed, L / 2, L + grow_L), torch.where(full, H + grow_H, H / 2)
    return torch.minimum(easy, hard), torch.maximum(easy, hard)


@dataclass(frozen=True)
class FedSAE(Method):
    rule: Literal["ira", "fassa"] = hyper("fassa", "how tasks grow: by U over themselves, or fast up to a threshold")
    easy: float = hyper(1.0, "epochs L of the easy task at first", at_least=0.001, at_most=10_000, toy=0.2)
    hard: float = hyper(2.0, "epochs H of the hard task at first", at_least=0.001, at_most=10_000, toy=0.4)
    U: float = hyper(10.0, "what ira divides by a task to let it grow; 0: tasks stay", at_least=0)
    memory: float = hyper(0.95, "share alpha of the last threshold in the next one of fassa", at_least=0, at_most=1)
    gamma1: float = hyper(3.0, "epochs by which fassa lets a task below the threshold grow", at_least=0, toy=0.5)
    gamma2: float = hyper(1.0, "epochs by which fassa lets other tasks grow", at_least=0, toy=0.2)
    beta: float = hyper(0.01, "how much clients with a large loss are preferred; 0: drawn as the run says", at_least=0)

    evaluates = "global"
    category = "global model: client selection"

    def check(self):
        if self.easy > self.hard:
            raise Problem(
                f"fedsae's easy task cannot be longer than its hard one: {self.easy:g} > {self.hard:g} epochs"
            )

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        zeros = w.new_zeros(clients, dtype=torch.float64)
        L, H = ((zeros + task).clamp_max(self.epochs) for task in (self.easy, self.hard))
        return {"w": w, "L": L, "H": H, "theta": zeros, "rounds": zeros, "able": zeros}

    def before_round(self, server, info):
        last = self.context.round - 1
        judged = self.judged(server, info, last) if last else {}
        return server | judged | {"able": info.affordable.to(self.model.device)}  # in the round that begins

    def judged(self, server, info, last):
        L, H, theta, rounds, able = (server[name] for name in ("L", "H", "theta", "rounds", "able"))
        asked, done = (info.asked == last).to(L.device), info.epochs.to(L)
        full, failed = done >= H, done == 0
        known = theta.where(rounds >= 2, 0)
        fast = lambda task: torch.where(task < known, self.gamma1, self.gamma2)
        grow = [self.U / task if self.rule == "ira" else fast(task) for task in (L, H)]
        new = [task.clamp(0.001, self.epochs) for task in followed(L, H, full, failed, *grow)]
        reached = torch.where(full, H, able.where(able.isfinite(), 0)).floor()
        theta = torch.where(rounds > 0, self.memory * theta + (1 - self.memory) * reached, reached)
        after = {"L": new[0], "H": new[1], "theta": theta, "rounds": rounds + 1}
        return {name: torch.where(asked, each, server[name]) for name, each in after.items()}

    def cohort_of(self, server, info):
        ids = list(info.draw())
        if self.beta:
            known, sizes = info.loss[info.loss.isfinite()], torch.tensor(info.sizes, dtype=torch.float64)
            v = sizes.sqrt() * info.loss.nan_to_num(float(known.max()) if len(known) else 1.0)
            odds = (self.beta * v[info.available]).softmax(0).clamp_min(1e-300)
            key = derive(self.context.seed, SELECT, self.context.round)
            ids = [info.available[place] for place in choose_by(key, self.context.cohort, odds)]
        return Selection(ids, server["H"][ids].tolist(), server["L"][ids].tolist())

    def broadcast(self, server, ids):
        return Down(shared=server["w"])

    def risk(self, batch, w):
        return self.model.loss(w, batch)[0]

    def local(self, client, down, data):
        loss = data.mean(self.risk, down.shared) if self.beta else None
        return client, Up(mean=self.descend(down.shared, data) - down.shared, loss=loss)

    def aggregate(self, server, cohort):
        return server | {"w": server["w"] + cohort.mean}

    def personalise(self, client, down, data):
        return down.shared

    def global_model(self, server):
        return server["w"]

    def notes(self, server):
        return {"easy": float(server["L"].mean()), "hard": float(server["H"].mean())}
