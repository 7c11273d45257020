"""FAVOR: an agent that has learned by deep Q-learning chooses who takes part, by what the clients' models are like.

After the description of Wang, Kaplan, Niu, Li: Optimizing Federated Learning on Non-IID Data with Reinforcement
Learning. INFOCOM 2020. https://doi.org/10.1109/INFOCOM41043.2020.9155494

In a first round all clients train from the initial model; a state is their models and the server's, in the principal
components of these. Then the agent is trained, in rounds of the run: an episode begins anew with drawn clients, after
that a single one trains at a time, tried at random or chosen. The reward is 64^(accuracy - target) - 1, on labelled
public samples. From then on the clients with the largest values train. With everybody in every round it is FedAvg.

An agent knows one federation and no other: samples, seed, local training. One comes with perfed, for the default one;
it is used where the first round gives the very models that it knows. Elsewhere `episodes` (1 + `steps`) rounds go by
first, and an agent of as few as by default chooses badly. How it learns (`shared/dqn`) is our own choice.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import SELECT, derive
from perfed.core.rounds import Phase
from perfed.methods.shared.agents import agent_of
from perfed.methods.shared.dqn import choice, learned, moved, new_agent, shown, trial
from perfed.methods.shared.goodness import goodness
from perfed.methods.shared.principal import coordinates, space_of

PROFILING, TRAINING, CHOOSING, DRAWING = "profiling", "training", "choosing", "drawing"
FEW = 2  # episodes of training where nobody asks for more


@dataclass(frozen=True)
class FAVOR(Method):
    episodes: int = hyper(0, "episodes of training; 0: an agent that comes along, or 2", at_least=0, at_most=10_000)
    steps: int = hyper(5, "rounds of one client in an episode, at most", at_least=1, at_most=10_000)
    target: float = hyper(0.85, "accuracy that ends an episode", above=0, at_most=1)
    gamma: float = hyper(0.95, "what the next round's reward counts", at_least=0, at_most=1)
    units: int = hyper(512, "width of the agent's hidden layer", at_least=1, at_most=100_000)
    components: int = hyper(100, "principal components; at most one for each client", at_least=1, at_most=10_000)

    evaluates = "global"
    category = "global model: client selection"
    averages = False
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = "labelled"

    def check(self):
        if self.model.task.headline != "accuracy":
            raise Problem(f"favor's reward is accuracy, and this task is {self.model.task.kind}")

    def init_server(self, clients):
        w, stage = self.model.init(self.context.seed), PROFILING if self.context.cohort < clients else DRAWING
        count = min(self.components, clients - 1) if stage == PROFILING else 0
        table, moves = w.new_zeros(clients + 1, count), (self.episodes or FEW) * self.steps
        agent = new_agent(derive(self.context.seed, SELECT), table, self.units, moves)
        space = {"origin": w, "directions": w.new_zeros(count, len(w))}
        return {"w": w, "agent": agent, "space": space, "accuracy": w.new_zeros(()), "stage": stage}

    def before_round(self, server, info):
        agent, accuracy = server["agent"], float(server["accuracy"])
        if not agent["moved"]:
            return server
        over = accuracy >= self.target or agent["step"] == self.steps
        agent = learned(agent, self.context.seed, 64 ** (accuracy - self.target) - 1, over, self.gamma)
        w = self.model.init(self.context.seed) if over else server["w"]
        stage = TRAINING if agent["episode"] < (self.episodes or FEW) else CHOOSING
        return server | {"agent": agent, "w": w, "stage": stage}

    def phase(self, server):
        return Phase(server["stage"], everybody=server["stage"] == PROFILING)

    def cohort_of(self, server, info):
        agent, m = server["agent"], self.context.cohort
        if agent["step"] > 0:
            return trial(agent, derive(self.context.seed, SELECT, self.context.round), info.available)
        return choice(agent, info.available, m) if server["stage"] == CHOOSING else info.draw()

    def broadcast(self, server, ids):
        return Down(shared=server["w"])

    def local(self, client, down, data):
        return client, Up(own={"change": self.descend(down.shared, data) - down.shared, "samples": data.size})

    def aggregate(self, server, cohort):
        w, agent, change, n = server["w"], server["agent"], cohort.own["change"], cohort.own["samples"]
        if server["stage"] == PROFILING:
            return server | self.profiled(agent, w.repeat(len(agent["first"]), 1).index_add(0, 1 + cohort.ids, change))
        new = w + n.to(w.dtype) @ change / n.sum()
        places = coordinates(server["space"], torch.cat([new[None], w + change]))
        return server | {"w": new, "agent": moved(agent, cohort.ids, places, server["stage"] == TRAINING)}

    def profiled(self, agent, models):
        space, table = space_of(models, agent["first"].shape[1])
        q = None if self.episodes else agent_of(table, len(agent["q"]))
        return {"space": space, "agent": shown(agent, table, q), "stage": TRAINING if q is None else CHOOSING}

    def refine(self, server, cohort, public):
        return server | {"accuracy": goodness(self, server["w"], public)}

    def personalise(self, client, down, data):
        return down.shared

    def global_model(self, server):
        return server["w"]

    def notes(self, server):
        return {"phase": server["stage"], "episodes": server["agent"]["episode"]}
