"""LG-FedAvg: the lower layers stay with the client, the head is shared; both are trained together.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations. 2020, Algorithm 1. https://arxiv.org/abs/2001.01523

FedPer the other way round: small messages, and clients may see different kinds of inputs. The first `warmup` rounds are
FedAvg's and in the next one clients start from that model, as the authors' code starts from a FedAvg model (of hundreds
of rounds): without it the lower layers grow apart and no head fits all. From then on a client keeps the lower layers it
trained LAST; one that was first chosen later has the initial ones. The authors' code keeps those that were best on the
client's test data, and averages uniformly.
"""

from dataclasses import dataclass
from typing import Any

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.methods.fedper import FedPer


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    personal: str = hyper("body", "what stays with the client: body or a pattern of lower layers; 'none' is FedAvg")
    warmup: int = hyper(
        10,
        "rounds in which everything is shared, before the others; 0 starts from scratch",
        at_least=0,
        at_most=1_000_000,
    )

    warms_up = "warmup"

    def init_server(self, clients) -> Any:
        w = self.model.init(self.context.seed)
        return {"w": w, "round": 0}

    def broadcast(self, server, ids):
        t, w = server["round"], server["w"]
        if t < self.warmup:
            return Down(shared={"fedavg": w})
        return Down(shared={"start": w} if t == self.warmup > 0 else {"upper": self.sent.take(w)})

    def join(self, client, down):
        if "upper" in down.shared:
            return self.kept.put(self.sent.put(self.model.init(self.context.seed), down.shared["upper"]), client)
        return next(iter(down.shared.values()))

    def local(self, client, down, data):
        start = self.join(client, down)
        w = self.descend(start, data)
        return self.kept.take(w), Up(mean=w - start if "fedavg" in down.shared else self.sent.take(w - start))

    def aggregate(self, server, cohort):
        t, w = server["round"], server["w"]
        w = w + cohort.mean if t < self.warmup else self.sent.add(w, cohort.mean)
        return {"w": w, "round": int(t) + 1}
