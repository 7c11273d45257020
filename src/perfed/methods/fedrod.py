"""FedRoD: a generic model trained with a class-balanced loss, and a private head added to its logits.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022, Algorithm 1,
linear personal head. https://arxiv.org/abs/2107.00778

The head is linear, so a sum of logits is a sum of weights: the personal model is the vector theta + H, and H is not 0
on the head's entries only. Both steps use the same representation, that of the body before its step; the personal loss
moves H alone. H starts at 0, as the generic model. pi counts ALL training samples; 1e-12 keeps log(pi) of absent
classes finite. `global` in the results is the generic model. The hyper-network for new clients is left out.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method
from perfed.core.model import average


@dataclass(frozen=True)
class FedRoD(Method):
    gamma: float = hyper(1.0, "strength of the balance, pi^gamma; 0 trains the generic model as FedAvg", at_least=0)

    evaluates = "assembled"
    category = "personalised models: parameter decoupling"

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"fedrod balances classes, which only classification has, and this task is {task.kind}")
        head = self.model.module(self.model.init(self.context.seed)).get_submodule(self.model.head_name)
        if not isinstance(head, nn.Linear):
            kind = type(head).__name__
            raise Problem(f"fedrod adds two linear heads, and '{self.model.head_name}' is {kind}: name an nn.Linear")

    def init_server(self, clients):
        return self.model.init(self.context.seed)

    def init_client(self):
        return torch.zeros_like(self.model.head.take(self.model.init(self.context.seed)))  # H

    def join(self, theta, H):
        return self.model.head.add(theta, H)

    def frequencies(self, batch, _):
        classes = self.model.shapes[f"{self.model.head_name}.weight".lstrip(".")][0]
        label = (batch.y[:, None] == torch.arange(classes, device=batch.y.device)).to(self.model.dtype)
        weight = torch.ones_like(label[:, 0]) if batch.weight is None else batch.weight
        return (weight[:, None] * label).sum(0) / weight.sum()

    def balanced(self, log_pi, theta, batch, train):
        logits, fresh = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
        each = cross_entropy(logits + self.gamma * log_pi, batch.y, reduction="none")
        return average(self.model.by_class(each, batch.y), batch.weight), fresh

    def step(self, carry, batch, log_pi):
        theta, v, H, u = carry
        g, fresh, _ = self.model.grad(theta, batch, lambda *given: self.balanced(log_pi, *given))
        h, _, _ = self.model.grad(theta + H, batch)
        theta, v = self.update(fresh, v, g)
        H, u = self.update(H, u, h, only="head")
        return theta, v, H, u

    def local(self, client, down, data):
        theta, zero = down.shared, self.model.zeros()
        log_pi = (data.mean(self.frequencies) + 1e-12).log()
        carry = theta, self.start(theta), self.join(zero, client), self.start(theta)
        theta, _, H, _ = data.fold(self.step, carry, log_pi)
        return self.model.head.take(H), Up(mean=theta - down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        return {"personal": self.join(down.shared, client), "global": down.shared}
