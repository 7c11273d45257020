"""What the slow references share: clients, networks and SGD in plain torch.

Of perfed they use the ORDER of the batches and nothing else; everything is float64 and loops in Python. The second half
of the file runs the library on the same world.
"""

import copy
from dataclasses import replace

import torch
from torch import nn

from perfed.core.clients import Split
from perfed.core.model import Model
from perfed.core.networks import Networks
from perfed.core.random import PUBLIC, TRAIN, derive, shuffle
from perfed.core.rates import Rates
from perfed.core.tree import rows, stack
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation

ROUNDS = ((0, 1, 3), (1, 2, 3), (0, 2, 3))  # client 4 never takes part
SEED = ORDER = 5  # of the initial model, and of the batches
NEVER = 4
# 7 leaves no last batch of one sample among the tests' clients: PyTorch's BatchNorm would refuse it.
SETTINGS = {"lr": 0.05, "momentum": 0.0, "nesterov": False, "weight_decay": 0.01, "epochs": 2, "batch_size": 7}


def plain_net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def norm_net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def flat(net, wanted=lambda name: True):
    """Parameters, then floating buffers, of the entries with a wanted name."""
    named = [*net.named_parameters(), *net.named_buffers()]
    found = [t.detach().reshape(-1) for name, t in named if t.is_floating_point() and wanted(name)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def weights(net):
    """The parameters alone as one vector, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def slope(net):
    """The gradients alone as one vector, a copy."""
    return torch.cat([p.grad.reshape(-1) for p in net.parameters()])


def push(net, vector):
    """Add a vector to the gradients."""
    at = 0
    for p in net.parameters():
        p.grad += vector[at : at + p.numel()].reshape(p.shape)
        at += p.numel()


def average(nets, shares):
    """A network with the weighted mean of parameters and floating buffers."""
    out = copy.deepcopy(nets[0])
    states, result = [net.state_dict() for net in nets], {}
    for name, first in states[0].items():
        result[name] = first
        if first.is_floating_point():
            result[name] = sum(s * state[name] for s, state in zip(shares, states, strict=True)) / sum(shares)
    out.load_state_dict(result)
    return out


def equal_clients(clients):
    """Four clients of 14 samples: uniform weights and sample counts agree."""
    cut = lambda s, n: Split(s.x[: 4 * n], s.y[: 4 * n], (n,) * 4)
    splits = {"train": cut(clients.train, 14), "val": cut(clients.val, 2), "test": cut(clients.test, 3)}
    return replace(clients, names=tuple("abcd"), **splits)


def orders(key, count, epochs, size):
    """The rows of each batch, in epochs through so many samples."""
    every = [shuffle(derive(key, 0, epoch)[None], torch.tensor([count]), count)[0] for epoch in range(epochs)]
    return [rows for order in every for rows in order.split(size)]


def step_keys(key, count, stream=0):
    """The keys that the steps of a loop draw from; `key` is that of the loop's purpose, round and client."""
    return [derive(key, stream, 0, 1, step) for step in range(count)]


class World:
    """One small federation, seen by plain torch and by the library."""

    def __init__(self, build, clients, **settings):
        self.build, self.clients, self.settings = build, clients, SETTINGS | settings

    # ------------------------------------------------------------------ plain torch

    def net(self, seed=SEED):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().double()

    def count(self, i):
        return self.clients.train.size[i]

    def samples(self, i, split="train"):
        table = getattr(self.clients, split)
        first = sum(table.size[:i])
        return table.x[first : first + table.size[i]], table.y[first : first + table.size[i]]

    def batches(self, i, round, epochs=None, purpose=(TRAIN,), stream=0, exchange=0):
        """The library's batches of client i. The only thing taken from it."""
        x, y = self.samples(i)
        tail = (exchange,) if purpose == (TRAIN,) else ()  # an evaluation has none
        key = derive(ORDER, *purpose, round, *tail, i, stream, 0)
        epochs = self.settings["epochs"] if epochs is None else epochs
        return [(x[rows], y[rows]) for rows in orders(key, len(y), epochs, self.settings["batch_size"])]

    def public_rows(self, i, round, epochs, size, exchange=0):
        """The rows of the public samples in the library's batches of client i."""
        key = derive(ORDER, TRAIN, round, exchange, i, PUBLIC, 0, 0)
        return orders(key, len(self.clients.public.y), epochs, size)

    def steps(self, i, round, count, exchange=0):
        """The library's first so many batches of client i in an exchange, over as many epochs as they take."""
        x, y = self.samples(i)
        key, out, epoch = derive(ORDER, TRAIN, round, exchange, i, 0, 0), [], 0
        while len(out) < count:
            order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
            out += [(x[rows], y[rows]) for rows in order.split(self.settings["batch_size"])]
            epoch += 1
        return out[:count]

    def sgd(self, net):
        names = ("lr", "momentum", "nesterov", "weight_decay")
        return torch.optim.SGD(net.parameters(), **{name: self.settings[name] for name in names})

    def train(self, net, batches, penalty=None, shift=None):
        """A copy of `net` after SGD on `batches`, with a penalty in the loss or a vector added to each gradient."""
        net = copy.deepcopy(net).train()
        optimiser = self.sgd(net)
        for x, y in batches:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            (loss if penalty is None else loss + penalty(net)).backward()
            if shift is not None:
                push(net, shift)
            optimiser.step()
        return net

    def risk(self, net, i, split="train"):
        """The mean loss of client i, with the network in eval mode."""
        x, y = self.samples(i, split)
        return nn.functional.cross_entropy(net.eval()(x), y)

    def net_of(self, i):
        """The network that client i begins with."""
        return self.net()

    # ------------------------------------------------------------------ the library

    def method(self, kind, **settings):
        return kind(Model(self.build, dtype=torch.float64), **(self.settings | settings))

    def federation(self, kind, clients=None, length=1, **more):
        cohort = more.pop("cohort", 3)
        method, rates = self.method(kind, **more), Rates(rounds=length)
        return Federation(Sequential(Job(method, clients or self.clients, ORDER, cohort, rates=rates)))

    def run(self, kind, rounds=ROUNDS, **more):
        fed = self.federation(kind, length=len(rounds), **more)
        for cohort in rounds:
            fed.step(cohort)
        return fed


class Mixed(World):
    """One in which clients have networks that differ: `of` says who has which of `builds`."""

    def __init__(self, builds, clients, of=(0, 1, 1, 0, 0), **settings):
        super().__init__(builds[0], clients, **settings)
        self.builds, self.of = builds, of

    def net_of(self, i):
        return World(self.builds[self.of[i]], self.clients).net()

    def method(self, kind, **settings):
        builds = {build.__name__: build for build in self.builds}
        several = Networks.of_one_width(builds, self.of, dtype=torch.float64)
        return kind(several.models[0], **(self.settings | settings)).at(networks=several)


def models(fed):
    """Every client's models as an evaluation hands them out: name -> one row per client, of each tensor of a tree."""
    found = {}
    fed.evaluate(save=found.__setitem__)
    return {name: stack([found[i][name] for i in range(len(fed.clients))]) for name in found[0]}


def personal(fed):
    """Every client's personal model, one row each."""
    return models(fed)["personal"]


def close(actual, expected):
    """Equal up to rounding; what a row of theta holds beyond `expected` is padding and must be 0."""
    torch.testing.assert_close(actual[: len(expected)], expected, rtol=1e-9, atol=1e-11)
    assert not actual[len(expected) :].any()


def same(actual, expected):
    """Equal up to rounding, entry by entry of a tree."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def differs(a, b):
    """Clearly not equal."""
    return float((a - b).abs().max()) > 1e-4


def check_kept(fed, before, ids):
    """Clients `ids` still have the states `before`, bit for bit."""
    for i in ids:
        now = state_of(fed, i)
        torch.testing.assert_close(now, before[i], rtol=0, atol=0)


def check_no_alias(fed):
    """What an evaluation returned, and states handed out, do not move when training goes on."""
    handed = {}
    fed.evaluate(save=handed.__setitem__)
    held = (handed, dict(fed.engine.states[0]), fed.server)
    before = copy.deepcopy(held)
    fed.step((0, 1, 2))
    fed.evaluate(save=lambda i, found: None)
    torch.testing.assert_close(held, before, rtol=0, atol=0)


def per_client(fed):
    """(down, up) of one client and round so far, in float64 numbers; every round had three clients."""
    sent = 3 * fed.round * 8
    assert fed.traffic.down % sent == 0
    assert fed.traffic.up % sent == 0
    return fed.traffic.down // sent, fed.traffic.up // sent


def state_of(fed, id):
    """A client's private state; that of a client that never took part is the initial one."""
    return rows(fed.engine.states[0].take([id]), 0)
