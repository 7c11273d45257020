"""Reptile: clients train a little from the received model, and the server goes a part of the way to their mean.

After the description of Nichol, Achiam, Schulman: On First-Order Meta-Learning Algorithms. 2018.
https://arxiv.org/abs/1803.02999

The step eps falls linearly over the run's rounds, to 0 in the round after the last; `decay` off keeps it. The mean over
clients is uniform: with eps 1 and no decay this is FedAvg where all clients have as many samples. Running statistics
are averaged, whatever eps is. Adam's state is new in every round, as with every method here; the original keeps it.
Our choice: a client is evaluated after `adapt_epochs` epochs from the received model, of which nothing is kept;
`global` in the results is that model itself. FedAvg with a step of the server, weighted by samples, is
`fedavg --server-optimizer momentum --server-momentum 0 --server-rate 0.5`.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.rates import Rates
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Reptile(FedAvg):
    eps: float = hyper(1.0, "step eps of the server towards the clients' mean, in the first round", above=0)
    decay: bool = hyper(True, "eps falls linearly over the rounds of the run")
    steps: int = hyper(0, "local steps K in a round; 0: all batches of `epochs` epochs", at_least=0, at_most=1_000_000)
    adapt_epochs: int = hyper(1, "local epochs before an evaluation; 0 evaluates as is", at_least=0, at_most=10_000)

    evaluates = "adapted"
    category = "global model: meta-learning"

    def local(self, client, down, data):
        w = self.descend(down.shared, data, steps=self.steps or None)
        return client, Up(mean=w - down.shared, weight=1.0)

    def step_size(self):
        falls = Rates("linear" if self.decay else "constant", rounds=self.context.rounds)
        return self.eps * falls.factor(self.context.round)

    def aggregate(self, server, cohort):
        return server + self.model.weights.only(self.step_size() * cohort.mean, cohort.mean)

    def personalise(self, client, down, data):
        return {"personal": self.descend(down.shared, data, epochs=self.adapt_epochs), "global": down.shared}

    def notes(self, server):
        return {"eps": self.step_size()}
