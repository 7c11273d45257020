"""Trials of a network before it trains: what does not fit is found before anything is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.random import derive

Make = Callable[[], nn.Module]
_SAMPLES = 3  # of a batch: BatchNorm needs two, and a partial batch fewer than a whole one
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-2}  # differences that are rounding, relative to the largest number


def refuse_unfit(make: Make, name: str, clients: Clients, dtype: torch.dtype = torch.float32) -> None:
    """Make a network once and give it samples: refuse what cannot train on these clients' samples.

    Args:
        make: makes the network.
        name: what messages call it.
        clients: those who train it.
        dtype: the numbers that the run computes in.
    """
    with torch.random.fork_rng(devices=[]):  # the trial must not change what is drawn later
        try:
            net = make()
        except Problem:
            raise
        except Exception as error:
            raise Problem(f"model.name '{name}' raised {type(error).__name__}: {error}") from error
        if not isinstance(net, nn.Module):
            raise Problem(f"model.name '{name}' returned {type(net).__name__}, not a torch.nn.Module")
        _refuse_other_numbers(net, name, dtype)
        batch = _batch(clients, dtype)
        before = _random_states()
        try:
            with torch.no_grad():
                logits = net.to(dtype).eval()(batch.x[:1])
            drawn = [] if _random_states() == before else ["evaluation"]
        except Problem:
            raise
        except Exception as error:
            raise _unfit(name, clients, error) from error
        task = clients.task
        wanted = (1, *batch.y.shape[1:], task.outputs) if task.kind == "next_token" else (1, task.outputs)
        if not isinstance(logits, Tensor) or logits.shape != wanted:
            returned = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise Problem(
                f"model.name '{name}' must return one number for each of {task.outputs} {task.things}: "
                f"{wanted} for one sample, not {returned}"
            )
        model = Model(make, dtype=dtype, task=task)
        theta, before = model.init(0), _random_states()
        try:
            with torch.no_grad():
                model.apply(theta, batch.x[[0, 0]], train=True, key=batch.key)
        except Problem:
            raise
        except Exception as error:
            raise _unfit(name, clients, error) from error
        drawn += [] if _random_states() == before else ["training"]
        if drawn:
            raise Problem(
                f"model.name '{name}' draws random numbers of its own in {drawn[0]}, which no seed of a run reaches: "
                "use dropout, as a module or a function, and in training alone"
            )


def _unfit(name: str, clients: Clients, error: Exception) -> Problem:
    return Problem(
        f"model.name '{name}' cannot take a sample of shape {clients.shape}: {type(error).__name__}: {error}"
    )


def refuse_other_gradients(make: Make, name: str, clients: Clients, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a network that would train otherwise here than in a plain loop of PyTorch.

    A `Model` puts parameters into the network by name; a network that keeps them elsewhere too, or writes over them,
    does not see that. One that draws random numbers in training cannot be compared.

    Args:
        make: makes the network.
        name: what messages call it.
        clients: those who train it.
        dtype: the numbers that the run computes in.
    """
    with torch.random.fork_rng(devices=[]):
        model, batch = _exact(make, clients, dtype)
        theta = model.init(0)
        g, fresh, _ = model.grad(theta, batch)
        if not torch.equal(theta, model.init(0)):
            raise Problem(f"model.name '{name}' writes over its parameters when it is called")
        if model.keyed:
            return
        net = model.module(theta).train()
        try:
            model.task.losses(net(batch.x), batch.y).mean().backward()
        except Exception as error:
            raise Problem(f"model.name '{name}' cannot train in PyTorch: {type(error).__name__}: {error}") from error
    plain = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in net.named_parameters()}
    ours, statistics = model.state_dict(g), model.state_dict(fresh)
    kept = {n: t for n, t in net.state_dict().items() if n not in plain and n in statistics}
    pairs = [(ours[n], t) for n, t in plain.items()] + [(statistics[n], t) for n, t in kept.items()]
    for tensor, (mine, other) in zip([*plain, *kept], pairs, strict=True):
        if not _alike(mine, other):
            raise Problem(
                f"model.name '{name}' trains '{tensor}' otherwise than a plain loop of PyTorch would: parameters must "
                "be reached as attributes of their modules, and only an optimiser may change them"
            )


def unbatchable(make: Make, clients: Clients, dtype: torch.dtype = torch.float32) -> str:
    """Return why a network cannot be run for many clients at once; empty where it can.

    Its code may depend on values, which differ between clients. In a block, the filling of a partial batch stands
    beside real samples, and only our own layers know to ignore it.

    Args:
        make: makes the network.
        clients: those who train it.
        dtype: the numbers that the run computes in.
    """
    model, batch = _exact(make, clients, dtype)
    thetas = torch.stack([model.init(0), model.init(1)])
    partial = torch.tensor([1.0] * (_SAMPLES - 1) + [0.0], dtype=model.dtype)
    weights, keys = torch.stack([torch.ones_like(partial), partial]), torch.stack([batch.key, batch.key + 1])

    def client(theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return *model.grad(theta, Batch(x, y, weight, key)), model.apply(theta, x)[0]

    few = Batch(batch.x[:-1], batch.y[:-1], None, keys[1])
    alone = [model.grad(thetas[0], batch), model.grad(thetas[1], few)]
    evaluated = [model.apply(theta, batch.x)[0] for theta in thetas]
    try:
        many = vmap(client)(thetas, torch.stack([batch.x] * 2), torch.stack([batch.y] * 2), weights, keys)
    except Exception as error:
        text = str(error).partition("\n")[0]
        if "data-dependent control flow" in text or ".item()" in text:
            return "its code looks at the numbers of a tensor (if, while, .item())"
        return f"{type(error).__name__}: {text}"
    for row, expected in enumerate([(*alone[0], evaluated[0]), (*alone[1], evaluated[1])]):
        if not all(_alike(mine[row], other) for mine, other in zip(many, expected, strict=True)):
            mixed = "it mixes the samples of a batch other than through BatchNorm"
            return mixed if row else "its gradients for many clients at once differ from those for one"
    return ""


def _batch(clients: Clients, dtype: torch.dtype) -> Batch:
    """Return a few training samples of these clients, the first ones again where there are not enough."""
    place = torch.arange(_SAMPLES) % len(clients.train.y)
    return Batch(clients.ready(clients.train.x[place], dtype).cpu(), clients.train.y[place].cpu(), None, derive(0))


def _exact(make: Make, clients: Clients, dtype: torch.dtype) -> tuple[Model, Batch]:
    """Return a model and a batch for comparing two ways: in float64 where the network takes it."""
    try:
        model, batch = Model(make, dtype=torch.float64, task=clients.task), _batch(clients, torch.float64)
        model.apply(model.init(0), batch.x)
    except Exception:  # its code makes tensors of float32
        return Model(make, dtype=dtype, task=clients.task), _batch(clients, dtype)
    return model, batch


def _alike(mine: Tensor, other: Tensor) -> bool:
    difference, size = (mine - other).abs().max(), other.abs().max()
    return not bool(difference > _CLOSE[mine.dtype] * (size + 1e-3))  # what is no number tells nothing


def _random_states() -> tuple[Any, ...]:
    """Return where the generators of PyTorch, Python and NumPy are."""
    legacy: Any = np.random.get_state()  # noqa: NPY002 (that of users)
    return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in legacy], legacy[1].tolist()


def _refuse_other_numbers(net: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Refuse parameters of a type that the run would not compute in."""
    for parameter in net.parameters():
        if (parameter.is_floating_point() or parameter.is_complex()) and parameter.dtype not in (torch.float32, dtype):
            kind, computed = (str(t).removeprefix("torch.") for t in (parameter.dtype, dtype))
            way = "use --precision float64" if parameter.dtype == torch.float64 else "perfed has float32 and float64"
            raise Problem(f"model.name '{name}' has parameters of {kind}, but the run computes in {computed}: {way}")
