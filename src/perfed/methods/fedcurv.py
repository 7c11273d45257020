"""FedCurv: clients are held where the others' last models were, most of all along what mattered to their samples.

After the description of Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: Overcoming Forgetting in Federated
Learning on Non-IID Data. 2019. https://arxiv.org/abs/1910.07796

The penalty is lam sum_j (w - w_j)' diag(I_j) (w - w_j) over the OTHER clients of the last round, j, where I_j is the
mean of squared gradients, one for each of j's samples, with its true label, at w_j after training, in eval mode. The
server has the sums U of I_j and V of I_j w_j; a client takes its own terms out where they are in them, that is where it
took part in that very round (OpenFL's code takes them out always, and squares gradients of the last batch as a whole).
Running statistics are not held. lam is not known from the paper: lr * 2 lam * max U must stay below 2. Where clients
fit their samples well I is nearly 0, with a single class from the start: then nothing is held and this is FedAvg.
"""

from dataclasses import dataclass

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method
from perfed.core.model import average


@dataclass(frozen=True)
class FedCurv(Method):
    lam: float = hyper(0.1, "weight of the penalty; 0 is FedAvg", at_least=0)

    evaluates = "global"
    category = "global model: regularised local loss"
    averages = False

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        return {"w": w, "U": torch.zeros_like(w), "V": torch.zeros_like(w), "round": torch.zeros_like(w[0])}

    def init_client(self):
        zero = self.model.zeros()
        return {"I": zero, "Iw": zero, "round": zero[0]}  # of the last round that it took part in

    def held(self, w, batch, others):
        g, fresh = self.gradient(w, batch)
        return g + 2 * self.lam * (others["U"] * w - others["V"]), fresh

    def squares(self, batch, w):
        return average(self.model.grads(w, batch) ** 2, batch.weight)

    def local(self, client, down, data):
        w, inside = down.shared["w"], (client["round"] == down.shared["round"]).to(down.shared["w"].dtype)
        others = {"U": down.shared["U"] - inside * client["I"], "V": down.shared["V"] - inside * client["Iw"]}
        w_i = self.descend(w, data, self.held, others)
        I = data.mean(self.squares, w_i, chunk=8)
        own = {"I": I, "Iw": I * w_i, "round": torch.full_like(client["round"], self.context.round)}
        mean, weight = {"w": w_i - w, "U": I, "V": I * w_i}, {"w": None, "U": 1.0, "V": 1.0}
        return own, Up(mean=mean, weight=weight)

    def aggregate(self, server, cohort):
        U, V = cohort.size * cohort.mean["U"], cohort.size * cohort.mean["V"]
        now = torch.full_like(server["round"], self.context.round)
        return {"w": server["w"] + cohort.mean["w"], "U": U, "V": V, "round": now}

    def personalise(self, client, down, data):
        return down.shared["w"]

    def global_model(self, server):
        return server["w"]

    def notes(self, server):
        return {"max_U": float(server["U"].max())}
