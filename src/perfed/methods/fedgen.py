"""FedGen: the server learns to generate representations from the clients' heads, and clients train on them, too.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021.
https://arxiv.org/abs/2105.10056

After the authors' code (github.com/zhuangdizhu/FedGen). From round 2 on a batch also teaches the head that G(eps, y')
is of class y' (alpha), and the network to say of a sample what its head says of G(eps, y) of its label (beta, not in
the paper). At the server a head counts for a label as often as its client met it in the round, and once more. Ours: a
tenth of their alpha and beta, for ten times the rate, with no end after 20 epochs or at 1e-4; y' has been met before.
"""

from dataclasses import dataclass

from torch.func import vmap
from torch.nn.functional import kl_div

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.further import further_model
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.model import average
from perfed.core.optim import adam, adam_start
from perfed.core.random import derive, pick
from perfed.methods.shared.generator import generate, likeness, network

DECAY, FADING = 0.01, 0.98  # L2 decay of G; what alpha, beta and the rate of G are multiplied by each round


@dataclass(frozen=True)
class FedGen(Method):
    generative_alpha: float = hyper(1.0, "weight of generated representations in a client's loss", at_least=0)
    generative_beta: float = hyper(1.0, "weight of what the head says of a generated one as target", at_least=0)
    eta: float = hyper(1.0, "weight of the term that keeps generated representations apart", at_least=0)
    generated: int = hyper(32, "representations beside a batch, and in G's", at_least=2, at_most=1_000_000, toy=6)
    generator_steps: int = hyper(50, "steps of the generator in a round", at_least=0, at_most=1_000_000, toy=4)
    generator_lr: float = hyper(3e-4, "learning rate of Adam for the generator", above=0)

    evaluates = "global"
    category = "personalised models: knowledge distillation"
    averages = False

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"fedgen generates representations of classes, and this task is {task.kind}")

    @further_model
    def generator(self):
        return network(self.model.outputs, self.model.representation)

    def init_server(self, clients):
        w, G = self.model.init(self.context.seed), self.generator.init(self.context.seed)
        return {"w": w, "G": (G, adam_start(G)), "labels": w.new_zeros(self.model.outputs).bool()}

    def broadcast(self, server, ids):
        return Down(shared={**server, "G": server["G"][0]})

    def step(self, carry, batch, given):
        (w, state, counts), (sent, (alpha, beta)) = carry, given
        y = pick(derive(batch.key, 2), self.generated, sent["labels"])
        same, z = (generate(self.generator, sent["G"], y, derive(batch.key, n))[1] for n, y in ((3, batch.y), (4, y)))
        target = self.model.classify(w, same).softmax(1)

        def loss(w, batch, train):
            out, fresh = self.model.apply(w, batch.x, train, batch.weight, batch.key)
            each = self.model.by_class(self.model.task.losses(out, batch.y), batch.y)
            each = each + beta * kl_div(out.log_softmax(1), target, reduction="none").sum(1)
            taught = self.model.task.losses(self.model.classify(w, z), y).mean()
            return average(each, batch.weight) + self.generated / self.batch_size * alpha * taught, fresh

        g, fresh, _ = self.model.grad(w, batch, loss)
        met = w.new_ones(len(batch.y)) if batch.weight is None else batch.weight
        return *self.update(fresh, state, g), counts.index_add(0, batch.y, met)

    def local(self, client, down, data):
        w, after = down.shared["w"], self.context.round - 1  # rounds that have trained G
        strength = w.new_tensor([self.generative_alpha, self.generative_beta]) * (FADING**after if after else 0)
        carry = w, self.start(w), w.new_ones(self.model.outputs)
        trained, _, counts = data.fold(self.step, carry, (down.shared, strength))
        own = {"head": self.model.head.take(trained), "counts": counts, "samples": data.size}
        return client, Up(mean=self.model.body.take(trained - w), own=own)

    def aggregate(self, server, cohort):
        own, w = cohort.own, self.model.body.add(server["w"], cohort.mean)
        share = own["samples"].double() / own["samples"].sum()
        w = self.model.head.put(w, (share @ own["head"].double()).to(w.dtype))
        return {**server, "w": w, "labels": server["labels"] | (own["counts"] > 1).any(0)}

    def improve(self, carry, batch, given):
        (G, state), (w, own, lr) = carry, given
        y = pick(derive(batch.key, 2), self.generated, (own["counts"] > 1).any(0))

        def loss(G, batch, train):
            eps, z, fresh = generate(self.generator, G, y, derive(batch.key, 3), train)
            judged = lambda head: self.model.task.losses(self.model.classify(self.model.head.put(w, head), z), y)
            each = (own["counts"] / own["counts"].sum(0))[:, y] * vmap(judged)(own["head"])  # [clients, generated]
            return each.mean(1).sum() + self.eta * likeness(eps, z), fresh

        g, fresh, _ = self.generator.grad(G, batch, loss)
        return adam(fresh, state, g + DECAY * self.generator.weights.only(G), lr)

    def refine(self, server, cohort, public):
        given = server["w"], cohort.own, server["w"].new_tensor(self.generator_lr * FADING ** (self.context.round - 1))
        return {**server, "G": public.fold(self.improve, server["G"], given, steps=self.generator_steps)}

    def personalise(self, client, down, data):
        return down.shared["w"]

    def global_model(self, server):
        return server["w"]
