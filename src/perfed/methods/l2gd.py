"""L2GD: coins decide, for all clients alike, between a local step and a step towards the mean of their models.

After the description of Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local Models. 2020.
https://arxiv.org/abs/2002.05516

It minimises the mean of f_i(x_i) + lambda/2 |x_i - xbar|^2: lambda = 0 is Local, infinity one model for all. With
probability p a step is x_i <- (1 - theta) x_i + theta xbar, else one of SGD; theta = lr lambda (1 - p) / p makes the
step an unbiased gradient, and theory asks for at most 1/2 of it. Only an averaging step after a local one costs
communication, so a round here is a run of j averaging steps, which leave xbar as it is, and then one of T local steps:
both lengths are geometric, drawn of seed and round, so this is L2GD exactly. Weights are uniform. If some take part in
a round, xbar is their mean and the others stay (our choice). Fixed lengths, `epochs` epochs and one averaging step, are
not L2GD. Gradients of batches are as noisy here as there: it ends in a neighbourhood of the optimum.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import SELECT, derive
from perfed.core.rounds import Phase
from perfed.methods.shared.coins import until


@dataclass(frozen=True)
class L2GD(Method):
    lam: float = hyper(0.1, "pull lambda towards the mean; 0 is Local", at_least=0)
    p: float = hyper(0.05, "probability of an averaging step", above=0, below=1)
    coins: Literal["drawn", "fixed"] = hyper(
        "drawn", "lengths of a round's two runs; fixed: 1 averaging step, `epochs` epochs"
    )

    evaluates = "own"
    category = "personalised models: interpolation"

    def check(self):
        if self.theta > 1:
            name = type(self).__name__.lower()
            raise Problem(f"{name} needs lr * lam * (1 - p) / p of at most 1, not {self.theta:g}: it leaps over means")

    @property
    def theta(self):
        return self.lr * self.lam * (1 - self.p) / self.p

    def lengths(self):
        """Return how many averaging steps and how many local steps this round has."""
        if self.coins == "fixed":
            return 1, None
        key = derive(self.context.seed, SELECT, self.context.round)
        return 1 + until(derive(key, 0), 1 - self.p), 1 + until(derive(key, 1), self.p)

    def init_server(self, clients) -> Any:
        return self.model.init(self.context.seed)  # xbar

    def init_client(self):
        return self.model.init(self.context.seed)

    def phase(self, server):
        return Phase(steps=self.lengths()[1])

    def broadcast(self, server, ids):
        return Down(shared={"xbar": server, "j": server.new_tensor(self.lengths()[0])})

    def newcomer(self, server):
        return Down(shared={"xbar": server, "j": server.new_tensor(math.inf)})  # it begins at the mean

    def local(self, client, down, data):
        xbar = down.shared["xbar"]
        x = xbar + (1 - self.theta) ** down.shared["j"] * (client - xbar)
        x = self.descend(x, data)
        return x, Up(mean=x - xbar, weight=1.0)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        return client

    def notes(self, server):
        averaging, local = self.lengths()
        return {"averaging_steps": averaging, "local_steps": local} if local else {}
