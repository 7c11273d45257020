"""FLIX: a client predicts with a mixture of its own optimum and a model that is trained for such mixtures.

Gasanov, Khaled, Horváth, Richtárik: FLIX: A Simple and Communication-Efficient Alternative to Local Methods in
Federated Learning. AISTATS 2022. https://arxiv.org/abs/2111.11556
After the authors' code (WilliamYi96/Scafflix, nn/src/FLIX.py).

Before its first round a client trains alone to its optimum x_i*; nothing is sent for that. Then all minimise the mean
of f_i(T_i(x)) over x, T_i(x) = a x + (1 - a) x_i*. With local steps it is the client's copy of x that is mixed, and
its gradient is a times that of f_i. x begins at the common initial model. As in the code, the server weights by
samples; an optimiser of the server is a setting of the run. All clients have one a, which is not learned: choose it
on validation samples. Weight decay belongs to f_i, so it is of the mixture, whose running statistics are mixed, too.
With Adam the step is a times that of the mixture.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.rounds import Phase
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FLIX(FedAvg):
    mix: float = hyper(0.5, "share a of x in the mixture; 1 is FedAvg, 0 Local", at_least=0, at_most=1)
    alone: int = hyper(100, "epochs of x_i*, before a client's first round", at_least=1, at_most=100_000, toy=2)

    evaluates = "assembled"
    category = "personalised models: interpolation"

    def init_client(self):
        return self.model.init(self.context.seed)  # x_i*

    def phase(self, server):
        return Phase(first="alone")

    def broadcast(self, server, ids):
        return Down() if self.context.phase == "alone" else Down(shared=server)

    def local_alone(self, client, down, data):
        return self.descend(client, data, epochs=self.alone), Up()

    def mixed(self, x, optimum):
        return optimum + self.mix * (x - optimum)  # T_i(x)

    def step(self, carry, batch, optimum):
        x, state = carry
        t = self.model.weights.only(self.mixed(x, optimum), x)
        g, fresh = self.gradient(t, batch)
        moved, state = self.update(fresh, state, g)
        return self.model.weights.only(x + self.mix * (moved - t), fresh), state

    def local(self, client, down, data):
        x, _ = data.fold(self.step, (down.shared, self.start(down.shared)), client)
        return client, Up(mean=x - down.shared)

    def aggregate(self, server, cohort):
        return server if self.context.phase == "alone" else server + cohort.mean

    def personalise(self, client, down, data):
        return self.mixed(down.shared, client)
