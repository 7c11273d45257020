"""FAug: clients fill up their classes with samples of a generator that the server trains on a few of each client's.

After the description of Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning:
Federated Distillation and Augmentation under Non-IID Private Data. 2018. https://arxiv.org/abs/1811.11479

The first round gathers seeds, and nobody trains. A class of which a client has some samples, but fewer than the share
`few` of an even part, is one of its targets: it sends k samples of each (or those it has), and of r other classes as a
cover; who has no target sends nothing. A message has room for k samples of every class, which is what is counted. The
server trains a conditional GAN on the seeds, class by class alike, images distorted, and sends a client the generator
once. The client adds samples of the classes in the pool until it has as many of each as of its largest, at most `ratio`
times as many as its own in all. The rest is FedAvg. All constants are our own choice. `leakage`, the mean over clients
of targets / (targets + cover), is what the server learns of who lacks what; seeds are samples that leave their client.
"""

from dataclasses import dataclass
from math import ceil

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.further import further_model
from perfed.core.messages import Down, Extension, Up
from perfed.core.method import Method
from perfed.core.rounds import Phase
from perfed.methods.shared.cgan import NOISE, critic_network, duel, generator_network, make, pool_of, start
from perfed.methods.shared.seeds import drawn, filling, gathered


@dataclass(frozen=True)
class FAug(Method):
    few: float = hyper(0.5, "share of an even part below which a class is a target; 0: FedAvg", at_least=0, at_most=1)
    k: int = hyper(10, "seed samples of a class at most", at_least=1, at_most=10_000)
    r: int = hyper(1, "other classes that a client sends as a cover for its targets", at_least=0, at_most=1_000)
    ratio: float = hyper(1.0, "generated samples at most, for each that a client has", above=0, at_most=100)
    gan_steps: int = hyper(2000, "steps of the generator and its critic", at_least=0, at_most=1_000_000, toy=2)
    gan_lr: float = hyper(2e-4, "learning rate of Adam for both", above=0)

    evaluates = "global"
    category = "global model: data augmentation"
    extends_in = "generator"

    def check(self):
        if self.model.task.kind != "classification":
            raise Problem(f"faug generates samples of classes, and this task is {self.model.task.kind}")

    @further_model
    def generator(self):
        return generator_network(self.model.outputs, self.model.inputs)

    @further_model
    def critic(self):
        return critic_network(self.model.outputs, self.model.inputs)

    def init_server(self, clients):
        w, G = self.model.init(self.context.seed), self.generator.init(self.context.seed)
        pool = {"known": w.new_zeros(self.model.outputs).bool(), "extent": w.new_zeros(2), "leakage": w.new_zeros(())}
        return {"w": w, "G": G, "gathered": int(not self.few), **pool}

    def phase(self, server):
        first = "generator" if server["known"].any() else ""
        return Phase(first=first) if server["gathered"] else Phase("seeds", everybody=True)

    def broadcast(self, server, ids):
        names = {"seeds": (), "generator": ("G", "known", "extent")}.get(self.context.phase, ("w",))
        return Down(shared={name: server[name] for name in names})

    def newcomer(self, server):
        return Down(shared={name: server[name] for name in ("w", "G", "known", "extent")})

    def drawn(self, batch, given):
        return drawn(batch, self.model.outputs, (ceil(self.ratio), NOISE))

    def local_seeds(self, client, down, data):
        return client, gathered(data.map(self.drawn), self.few, self.k, self.r)

    def duel(self, carry, batch, given):
        return duel(self.generator, self.critic, carry, batch, given)

    def refine(self, server, cohort, public):
        if self.context.phase != "seeds" or not (real := cohort.own["real"]).any():
            return server
        (x, y, weight), extent = pool_of(cohort.own["x"][real], real.nonzero()[:, 2])
        carry, lr = start(self.generator, self.critic, self.context.seed), server["G"].new_tensor(self.gan_lr)
        (G, _), _ = public.fold(self.duel, carry, (x, y, weight, lr), steps=self.gan_steps)
        return {**server, "G": G, "extent": extent, "known": real.flatten(0, 1).any(0)}

    def local_generator(self, client, down, data):
        return client, Up()

    def extend(self, client, down, data):
        mine, sent = data.map(self.drawn), down.shared
        noise = mine["noise"].flatten(0, 1)
        y, made = filling(mine["of"], sent["known"], self.ratio, len(noise))
        return Extension(make(self.generator, sent["G"], noise, y, sent["extent"]), y, made)

    def local(self, client, down, data):
        return client, Up(mean=self.descend(down.shared["w"], data) - down.shared["w"])

    def aggregate(self, server, cohort):
        if self.context.phase == "seeds":
            return {**server, "gathered": 1, "leakage": cohort.mean}
        return server if self.context.phase else {**server, "w": server["w"] + cohort.mean}

    def personalise(self, client, down, data):
        return down.shared["w"]

    def global_model(self, server):
        return server["w"]

    def notes(self, server):
        return {"leakage": float(server["leakage"]), "classes_in_pool": int(server["known"].sum())}
