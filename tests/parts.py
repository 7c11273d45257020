"""Training and putting together parts of a network in plain torch, for methods that share some of it."""

import copy

import torch
from torch import nn


def part_of(*starts):
    """Whether a name belongs to one of these modules."""
    return lambda name: name.startswith(starts)


def rest_of(*starts):
    """Whether a name belongs to none of these modules."""
    return lambda name: not name.startswith(starts)


def assemble(shared, own, kept):
    """A network with the `kept` entries of `own` and everything else of `shared`."""
    net = copy.deepcopy(shared)
    net.load_state_dict({name: (own if kept(name) else shared).state_dict()[name] for name in net.state_dict()})
    return net


def train_part(world, net, batches, trained, lr=None):
    """A copy of `net` after SGD on the entries with a `trained` name alone; the rest has no optimiser at all."""
    before, net = copy.deepcopy(net), copy.deepcopy(net).train()
    rates = {name: world.settings[name] for name in ("lr", "momentum", "nesterov", "weight_decay")}
    free = [p for name, p in net.named_parameters() if trained(name)]
    optimiser = torch.optim.SGD(free, **(rates | ({"lr": lr} if lr else {}))) if free else None
    for x, y in batches:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if optimiser:
            optimiser.step()
    return assemble(before, net, trained)  # BatchNorm moved the statistics of frozen layers too
