"""FedEM: every client's data are a mixture of a few distributions, each with a model that all clients train.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions. NeurIPS 2021,
Algorithm 1. https://arxiv.org/abs/2108.10252
After the authors' code (omarfoq/FedEM).

A client keeps the weights pi of the models. In a round it computes, from the received models and the old pi, how far
each model is responsible for each of its samples, q = softmax(log pi - loss); their mean is the new pi, and every model
is trained on the losses times q, which stays as it is for all epochs. A batch's loss is divided by its samples, not by
the sum of q: a model learns as much more slowly as its weight is small. All models take the same batches (in the code
each has an order of its own). The server averages over those that took part; in the code the others count with their
old models, so that a tenth of the clients makes a tenth of a step. Probabilities are mixed, not logits. pi is renewed
for an evaluation (our choice). One model can take all; then it is FedAvg. Outside of classes a loss stands for minus
the logarithm of a likelihood.
"""

from dataclasses import dataclass

import torch
from torch.func import vmap

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import FINE_TUNING
from perfed.core.model import average
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared.blend import blend

LEAST = 1e-8  # of a weight: log 0 would never come back


@dataclass(frozen=True)
class FedEM(FedAvg):
    components: int = hyper(3, "number of models M; 1 is FedAvg", at_least=1, at_most=1_000, toy=2)

    evaluates = "assembled"
    category = "personalised models: multi-task"
    starts = "components"

    def init_server(self, clients):
        return torch.stack([self.model.init(self.context.seed * self.components + m) for m in range(self.components)])

    def init_client(self):
        return torch.full((self.components,), 1 / self.components, device=self.model.device, dtype=self.model.dtype)

    def responsible(self, batch, given):
        models, pi = given
        losses = vmap(lambda theta: self.model.task.losses(self.model.apply(theta, batch.x)[0], batch.y))(models)
        return (pi.clamp_min(LEAST).log()[:, None] - losses).softmax(0)  # q, [M, samples]

    def share(self, batch, given):
        return vmap(lambda q: average(q, batch.weight))(self.responsible(batch, given))

    def renewed(self, pi, models, data):
        return torch.where(data.size > 0, data.mean(self.share, (models, pi)), pi)

    def step(self, carry, batch, given):
        def gradient(theta, q):
            def loss(theta, batch, train):
                out, fresh = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
                each = self.model.by_class(self.model.task.losses(out, batch.y), batch.y)
                return average(q * each, batch.weight), fresh

            return self.model.grad(theta, batch, loss)

        after = []
        for (theta, state), q in zip(carry, self.responsible(batch, given), strict=True):
            g, fresh, _ = gradient(theta, q)
            after.append(self.update(fresh, state, g))
        return tuple(after)

    def trained(self, models, pi, data, **length):
        carry = tuple((theta, self.start(theta)) for theta in models)
        return torch.stack([theta for theta, _ in data.fold(self.step, carry, (models, pi), **length)])

    def local(self, client, down, data):
        models = self.trained(down.shared, client, data)
        return self.renewed(client, down.shared, data), Up(mean=models - down.shared)

    def personalise(self, client, down, data):
        return {"models": down.shared, "pi": self.renewed(client, down.shared, data)}

    def predict(self, model, x):
        outputs = torch.stack([self.model.apply(theta, x)[0] for theta in model["models"]])
        return blend(self.model.task, outputs, model["pi"])

    def tuned(self, model, client, down, data):
        length = {"epochs": self.fine_tune, "stream": FINE_TUNING}
        return model | {"models": self.trained(model["models"], model["pi"], data, **length)}
