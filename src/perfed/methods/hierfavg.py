"""HierFAVG: edge servers average their clients several times before the cloud averages the edges.

Liu, Zhang, Song, Letaief: Client-Edge-Cloud Hierarchical Federated Learning. ICC 2020, Algorithm 1.
https://arxiv.org/abs/1905.06641
After the authors' code (LuminLiu/HierFL).

A round is one of the cloud's: k2 exchanges between clients and edges, in each of which clients take k1 steps from
their edge's model, then the mean of the edges. An edge averages those of its clients that took part, by their samples;
the cloud weights an edge by the samples of all its clients, and leaves out those in which nobody took part. Clients are
drawn as the run says (the code draws them by size and averages by size, which counts size twice); its falling
learning rate is the run's `lr_schedule`. `down` and `up` are between clients and edges, `cloud_down` and `cloud_up`
between edges and cloud.
"""

from dataclasses import dataclass

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.rounds import Phase


@dataclass(frozen=True)
class HierFAVG(Method):
    edges: int = hyper(2, "edges; client i of N is at edge i M // N (data.team_order)", at_least=1, at_most=1_000_000)
    k1: int = hyper(0, "local steps of an exchange; 0: those of `epochs` epochs", at_least=0, at_most=1_000_000)
    k2: int = hyper(2, "exchanges with the edge in a round of the cloud; 1 is FedAvg", at_least=1, at_most=10_000)

    evaluates = "global"
    category = "global model: hierarchical"
    averages = False

    @property
    def groups(self):
        return self.edges

    def init_server(self, clients):
        if self.edges > clients:
            raise Problem(f"hierfavg cannot make {self.edges} edges of {clients} clients")
        x = self.model.init(self.context.seed)
        edge, n = torch.arange(clients, device=x.device) * self.edges // clients, x.new_zeros(self.edges)
        return {"x": x, "w": x.repeat(self.edges, 1), "edge": edge, "n": n, "here": n > 0}

    def before_round(self, server, info):
        sizes = server["n"].new_tensor(info.sizes)
        return server | {"n": torch.zeros_like(server["n"]).index_add(0, server["edge"], sizes)}

    def phase(self, server):
        return Phase(exchanges=self.k2)

    def begun(self, server):  # the edges' models of this exchange: a round starts from x
        return server["w"] if self.context.exchange else server["x"].expand_as(server["w"])

    def broadcast(self, server, ids):
        edge = server["edge"][ids]
        return Down(own={"w": self.begun(server)[edge], "edge": edge})

    def show(self, server, ids):
        return Down(shared=server["x"])

    def newcomer(self, server):
        return Down(shared=server["x"], own={"w": server["x"], "edge": torch.zeros_like(server["edge"][0])})

    def global_model(self, server):
        return server["x"]

    def local(self, client, down, data):
        w = self.descend(down.own["w"], data, steps=self.k1 or None)
        return client, Up(mean=w - down.own["w"], group=down.own["edge"])

    def aggregate(self, server, cohort):
        w, here = self.begun(server) + cohort.mean, cohort.weight > 0
        here = here | server["here"] if self.context.exchange else here
        x = server["x"]
        if self.context.exchange == self.k2 - 1:
            share = torch.where(here, server["n"], 0)
            x = x + share / share.sum() @ (w - x)
        return server | {"x": x, "w": w, "here": here}

    def extra_traffic(self, server):
        return {f"cloud_{way}": int(server["here"].sum()) * self.model.size for way in ("down", "up")}

    def personalise(self, client, down, data):
        return down.shared
