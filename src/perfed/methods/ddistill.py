"""D-Distillation: without a server, neighbours in a network agree on outputs for public samples and learn from them.

After the description of Bistritz, Mann, Bambos: Distributed Distillation for On-Device Learning. NeurIPS 2020.
https://proceedings.neurips.cc/paper/2020/hash/fef6f971605336724b5e6c0c12dc2534-Abstract.html

A device k, with a network of its own if it likes, adds to its loss rho times the mean squared distance of its
probabilities s_k on public samples (in evaluation mode, drawn with replacement) from p_k, what it holds the others' to
be. How p moves is our choice, with the properties that the paper claims: after a round p_k becomes sum_l A_kl p_l + s_k
- (s_k a round before), where A_kl = 1 / (1 + the larger degree of both) among neighbours (Metropolis). So the mean of
all p is that of all s at any time, and where s rests, every p comes to it on any connected graph. (A pull c (s_k - p_k)
of constant strength never does.) Rows of p sum to 1 but may leave [0, 1].

The engine's server stands for the network: what goes down and up would stay with a device, and `neighbours` counts p
over each edge and direction. Who sits out keeps its last s, and its p is mixed on. A larger rho brings classes that
others have and costs accuracy on a device's own.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.model import Batch
from perfed.core.random import derive, uniform
from perfed.methods.shared.distillation import of_outputs


@dataclass(frozen=True)
class DDistill(Method):
    rho: float = hyper(1.0, "weight of the distance from the network's outputs; 0 is Local", at_least=0)
    topology: Literal["ring", "line", "star", "complete"] = hyper("ring", "who is whose neighbour")
    public_batch: int = hyper(32, "public samples drawn for each step", at_least=1, at_most=1_000_000)

    evaluates = "own"
    category = "personalised models: knowledge distillation"
    averages = False
    own_networks = True
    refine_before = True
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = "unlabelled"
    sends_public: ClassVar[bool] = True

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"ddistill compares probabilities of classes, and this task is {task.kind}")

    def init_server(self, clients):
        zero = self.model.zeros().new_zeros(clients, self.context.public, self.model.outputs)
        return {"p": zero, "s": zero}

    def init_client(self):
        return self.model.init(self.context.seed)

    def mixing(self, clients):
        """Return A [clients, clients], on the host: what a device makes of its neighbours' p and its own."""
        i = torch.arange(clients)
        apart, hub = (i - i[:, None]).abs(), torch.minimum(i, i[:, None]) == 0
        linked = {"ring": (apart == 1) | (apart == clients - 1), "line": apart == 1, "star": hub, "complete": apart > 0}
        linked = linked[self.topology] & (apart > 0)
        degree = linked.sum(1).double()
        A = linked / (1 + torch.maximum(degree, degree[:, None]))
        return A + torch.diag(1 - A.sum(1))

    def soft(self, batch, w):
        return self.model.apply(w, batch.x)[0].softmax(-1)

    def refine(self, server, cohort, public):
        if cohort is not None:
            return server
        start = [self.with_network(k) for k in range(len(self.networks))]
        s = torch.stack([public.map(method.soft, method.init_client()) for method in start])[self.network_of]
        return {"p": s, "s": s}  # the same for all whose networks are alike

    def broadcast(self, server, ids):
        return Down(own=server["p"][ids])

    def newcomer(self, server):
        return Down(own=server["p"].mean(0))

    def samples(self, batch, given):
        return batch.x

    def distance(self, out, p):
        return ((out.softmax(-1) - p) ** 2).sum(-1)

    def pulled(self, w, batch, given):
        x, p = given
        g, fresh = self.gradient(w, batch)
        rows = (uniform(derive(batch.key, 1), (self.public_batch,), torch.float64) * len(x)).long()
        public, loss = Batch(x[rows], rows, None, batch.key, rows), of_outputs(self.model, self.distance, p)
        return g + self.rho * self.model.grad(w, public, loss, train=False)[0], fresh

    def local(self, client, down, data):
        w = self.descend(client, data, self.pulled, (data.public.map(self.samples), down.own))
        return w, Up(own=data.public.map(self.soft, w))

    def aggregate(self, server, cohort):
        s = server["s"].index_copy(0, cohort.ids, cohort.own)
        p = torch.tensordot(self.mixing(len(s)).to(s), server["p"], 1) + s - server["s"]
        return {"p": p, "s": s}

    def personalise(self, client, down, data):
        return client

    def extra_traffic(self, server):
        edges = self.mixing(len(server["p"])).fill_diagonal_(0).count_nonzero()
        return {"neighbours": int(edges) * server["p"][0].numel()}
