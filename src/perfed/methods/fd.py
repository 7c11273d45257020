"""FD: clients send the mean outputs of their own labels in place of models, and learn what others say of the label.

After the description of Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning:
Federated Distillation and Augmentation under Non-IID Private Data. 2018. https://arxiv.org/abs/1811.11479

A client keeps its own network. While it trains, it takes the mean of its logits for each label that it has: its table.
What the server sends back of a label is the mean over the OTHER clients that have it, as their last tables say. A
sample's loss gets g times the cross-entropy between the softmax of what the others say of its label, and the client's
output; where nobody else has the label, or nobody has said anything yet, there is no such term. (In PFLlib's code the
client's own table is in the mean, and the raw logits are the target, which is no distribution.) Networks may differ.

With `few` above 0 clients fill up their classes first, as FAug's do: its seeds, generator and settings.
"""

from dataclasses import dataclass

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.model import average
from perfed.methods.faug import FAug


@dataclass(frozen=True)
class FD(FAug):
    g: float = hyper(1.0, "weight of what others say of a sample's label; 0: Local", at_least=0)
    few: float = hyper(
        0.0, "share of an even part below which a class is a target of FAug; 0: FD alone", at_least=0, at_most=1
    )

    evaluates = "own"
    category = "personalised models: knowledge distillation"
    averages = False
    own_networks = True

    def check(self):
        if self.model.task.kind != "classification":
            raise Problem(f"fd exchanges outputs of classes, and this task is {self.model.task.kind}")

    def init_server(self, clients):
        server, K = FAug.init_server(self, clients), self.model.outputs
        tables = server.pop("w").new_zeros(clients, K, K)
        return {**server, "F": tables, "held": tables[:, 0].bool()}

    def init_client(self):
        return self.model.init(self.context.seed)

    def others(self, server, F, has):  # what those say whose tables these are not: the mean, and whether there is any
        n = server["held"].sum(0) - has.long()
        return {"F": (server["F"].sum(0) - F) / n.clamp_min(1)[..., None], "held": n > 0}

    def broadcast(self, server, ids):
        if self.context.phase:
            return FAug.broadcast(self, server, ids)
        return Down(own=self.others(server, server["F"][ids], server["held"][ids]))

    def newcomer(self, server):
        nothing = 0 * server["F"][0]
        generator = {name: server[name] for name in ("G", "known", "extent")}
        return Down(shared=generator, own=self.others(server, nothing, nothing[0].bool()))

    def learn(self, carry, batch, others):
        theta, state, sums, counts = carry
        target = others["F"][batch.y].softmax(1)

        def loss(theta, batch, train):
            out, fresh = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
            apart = -(target * out.log_softmax(1)).sum(1) * others["held"][batch.y]
            return average(
                self.model.by_class(self.model.task.losses(out, batch.y) + self.g * apart, batch.y), batch.weight
            ), fresh

        g, fresh, _ = self.model.grad(theta, batch, loss)
        out = self.model.apply(theta, batch.x, True, batch.weight, batch.key)[0]
        real = theta.new_ones(len(batch.y)) if batch.weight is None else batch.weight
        sums, counts = sums.index_add(0, batch.y, out * real[:, None]), counts.index_add(0, batch.y, real)
        return *self.update(fresh, state, g), sums, counts

    def local(self, client, down, data):
        K = self.model.outputs
        carry = client, self.start(client), client.new_zeros(K, K), client.new_zeros(K)
        theta, _, sums, counts = data.fold(self.learn, carry, down.own)
        return theta, Up(own={"F": sums / counts.clamp_min(1)[:, None], "held": counts > 0})

    def aggregate(self, server, cohort):
        if self.context.phase:
            return FAug.aggregate(self, server, cohort)
        new = {name: server[name].index_copy(0, cohort.ids, cohort.own[name]) for name in ("F", "held")}
        return {**server, **new}

    def personalise(self, client, down, data):
        return client

    def global_model(self, server):
        return Method.global_model(self, server)
