"""FedHome: an auto-encoder shares the encoder; every client tunes the classifier on classes that SMOTE has evened out.

After the description of Wu, Chen, Zhou, Zhang: FedHome: Cloud-Edge Based Personalized Federated Learning for In-Home
Health Monitoring. IEEE Transactions on Mobile Computing 2020. https://arxiv.org/abs/2012.07450

The encoder is the body, the classifier the head, the decoder a network with one hidden layer; all three are averaged.
They learn from cross-entropy and from the mean squared error of what is decoded. Before an evaluation the head alone is
tuned on codes of the client's own samples, whose classes SMOTE brings to the size of the largest; none of it is kept.

Ours: the codes are drawn anew for each batch, with replacement, and an epoch has as many batches as the client's own
samples make; the weight of the error, the epochs and their rate. A class with one sample is repeated, and one that a
client lacks stays absent. Plain accuracy may fall: look at balanced accuracy, in which rare classes count as others.
"""

import math
from dataclasses import dataclass

from torch import nn

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.further import further_model
from perfed.core.messages import Up
from perfed.core.method import Method
from perfed.core.model import average
from perfed.methods.shared.smote import Table, draw, neighbours


@dataclass(frozen=True)
class FedHome(Method):
    decoding: float = hyper(1.0, "weight of the decoder's squared error; 0 is none", at_least=0)
    decoder_width: int = hyper(128, "width of the decoder's hidden layer", at_least=1, at_most=1_000_000, toy=8)
    near: int = hyper(5, "nearest neighbours that SMOTE chooses among", at_least=1, at_most=1_000)
    even: bool = hyper(True, "even the classes out before the head is tuned")
    adapt_epochs: int = hyper(
        5, "epochs of the head before an evaluation; 0 is none", at_least=0, at_most=10_000, toy=2
    )
    adapt_lr: float = hyper(0.01, "learning rate of these epochs", above=0)

    evaluates = "adapted"
    category = "global model: data augmentation"

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"fedhome evens classes out, and this task is {task.kind}")
        if not len(self.model.body):
            raise Problem("fedhome decodes what enters the head, but this model learns nothing below its head")

    @further_model
    def decoder(self):
        first, last = math.prod(self.model.representation), math.prod(self.model.inputs or ())
        return nn.Sequential(nn.Linear(first, self.decoder_width), nn.ReLU(), nn.Linear(self.decoder_width, last))

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "d": self.decoder.init(self.context.seed)}

    def decoded(self, d, z, batch):
        each = (self.decoder.apply(d, z)[0] - batch.x.flatten(1)) ** 2
        return self.decoding * average(each.mean(1), batch.weight)

    def step(self, carry, batch, given):
        w, state, d, d_state = carry

        def loss(w, batch, train):
            out, z, fresh = self.model.features(w, batch, train)
            ce = average(self.model.by_class(self.model.task.losses(out, batch.y), batch.y), batch.weight)
            return ce + self.decoded(d, z, batch), fresh

        g, fresh, _ = self.model.grad(w, batch, loss)
        z = self.model.features(w, batch, True)[1]
        h = self.decoder.grad(d, batch, lambda d, *_: (self.decoded(d, z, batch), d))[0]
        return *self.update(fresh, state, g), *self.update(d, d_state, h, model=self.decoder)

    def local(self, client, down, data):
        w, d = down.shared["w"], down.shared["d"]
        after, _, decoder, _ = data.fold(self.step, (w, self.start(w), d, self.start(d)))
        return client, Up(mean={"w": after - w, "d": decoder - d})

    def aggregate(self, server, cohort):
        return {name: server[name] + cohort.mean[name] for name in server}

    def code(self, batch, w):
        return self.model.features(w, batch)[1], batch.y

    def among(self, batch, given):
        z, y, real = given
        return neighbours(batch.index, z, y, real, self.near)

    def tune(self, carry, batch, table):
        (w, state), (z, y) = carry, draw(batch.key, self.batch_size, table)
        each = lambda w: self.model.by_class(self.model.task.losses(self.model.classify(w, z), y), y)
        g = self.model.grad(w, batch, lambda w, *_: (each(w).mean(), w))[0]
        return self.update(w, state, g, only="head")

    def personalise(self, client, down, data):
        w, real, tuner = down.shared["w"], data.mask(), self.at_rate(self.adapt_lr)
        z, y = data.map(self.code, w)
        size, near, others = data.map(self.among, (z, y, real))
        table = Table(z, y, size if self.even else real.long(), near, others)
        tuned, _ = data.fold(tuner.tune, (w, tuner.start(w)), table, epochs=self.adapt_epochs)
        return {"personal": tuned, "global": w}

    def global_model(self, server):
        return server["w"]
