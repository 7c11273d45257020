"""A model is a vector: any nn.Module as pure functions of one flat tensor `theta`.

`theta` holds P parameters, then Q float buffers (the running statistics of BatchNorm), then zeros up to a multiple of
four numbers (rows of a cohort then stay aligned on a GPU). Padding is in no part, no count and no message.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import functional_call
from torch.func import grad as functional_grad

from perfed.accel import cpu_backward, fused_layers
from perfed.accel.fast import covered
from perfed.core.errors import Problem
from perfed.core.layers import Drop, Norm, swap

ALIGN = 4


class Batch(NamedTuple):
    """Some samples of one client."""

    x: Tensor
    y: Tensor
    weight: Tensor | None  # [samples], 0 for filling; None where every sample counts
    key: Tensor  # randomness of this step, for dropout


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    if covered(out):
        from perfed.accel import operators

        return operators.cross_entropy(out, y)
    return F.cross_entropy(out, y, reduction="none")


def average(each: Tensor, weight: Tensor | None) -> Tensor:
    """The mean of one number per sample over the samples that count."""
    return each.mean() if weight is None else (each * weight).sum() / weight.sum()


@dataclass(frozen=True, eq=False)
class Part:
    """Some entries of theta: a mask for arithmetic, an index for messages."""

    mask: Tensor  # [width], bool

    @cached_property
    def index(self) -> Tensor:
        return self.mask.nonzero().flatten()

    def __len__(self) -> int:
        return int(self.mask.sum())

    def take(self, theta: Tensor) -> Tensor:
        """Only these entries, [len(part)]."""
        return theta.index_select(0, self.index)

    def put(self, theta: Tensor, values: Tensor) -> Tensor:
        """`theta` with these entries replaced by `values`."""
        return theta.index_copy(0, self.index, values)

    def add(self, theta: Tensor, change: Tensor) -> Tensor:
        """`theta` with `change` added to these entries."""
        return theta.index_add(0, self.index, change)

    def only(self, theta: Tensor, other: Tensor | float = 0.0) -> Tensor:
        """`theta` here and `other` elsewhere."""
        return torch.where(self.mask, theta, other)


class Model:
    """Pure functions of theta, made from a function that builds an nn.Module."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        head: str = "",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rewrite: bool = True,  # False: the network runs as it was written
    ):
        if isinstance(build, nn.Module) or not callable(build):
            raise Problem(
                "Model needs a function that builds the network (each seed starts from its own), not a network"
            )
        self.build, self.dtype, self.device = build, dtype, torch.device(device)
        net = swap(self._fresh(seed=0)).to(self.device, dtype)
        frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
        net.requires_grad_(False)
        self._nets = {mode: copy.deepcopy(net).train(mode != "eval") for mode in ("eval", "train", "weighted")}
        for module in self._nets["weighted"].modules():
            if isinstance(module, Norm):
                module.weighted = True
        self._keyed = [name for name, m in net.named_modules() if isinstance(m, Drop)]
        self._drops = {mode: [m for m in n.modules() if isinstance(m, Drop)] for mode, n in self._nets.items()}
        self._normed = [name for name, m in net.named_modules() if isinstance(m, Norm)]

        params = {name: p.shape for name, p in net.named_parameters()}
        kept = net.state_dict()  # buffers that are not saved, such as tables of positions, are constants
        buffers = {n: b.shape for n, b in net.named_buffers() if b.is_floating_point() and n in kept}
        if not params:
            raise Problem("the model has no parameters")
        self.shapes = params | buffers
        self._buffers = list(buffers)
        self.P = sum(math.prod(s) for s in params.values())  # parameters
        self.Q = sum(math.prod(s) for s in buffers.values())  # float buffers
        self.size = self.P + self.Q
        self.width = -(-self.size // ALIGN) * ALIGN
        self._sizes = [math.prod(s) for s in self.shapes.values()] + [self.width - self.size]
        self._inits: dict[int, Tensor] = {}
        self.seeds: tuple[int, ...] = ()  # of runs that train together
        self._parts: dict[str, Part] = {}
        self.frozen = bool(frozen)
        self._name_parts(net, head, frozen)
        if rewrite:
            self._nets = {mode: fused_layers.rewrite(net, self.head_name) for mode, net in self._nets.items()}
        self._straight: dict[str, cpu_backward.Straight | None] = {}
        if rewrite:
            self._straight = {m: cpu_backward.straighten(self._nets[m], self.shapes, self.P) for m in ("eval", "train")}
        self._slots = {mode: self._find_slots(net) for mode, net in self._nets.items()}
        self._seen: list[Tensor] | None = None  # what enters the head, while `features` asks for it
        for net in self._nets.values():
            net.get_submodule(self.head_name).register_forward_pre_hook(self._look)

    def _name_parts(self, net: nn.Module, head: str, frozen: list[str]) -> None:
        owner = [name.rpartition(".")[0] for name in self.shapes]
        owners = list(dict.fromkeys(owner[: len(self.shapes) - len(self._buffers)]))
        self.layers = owners  # names of the modules that own parameters, in order
        if head and not any(o == head or o.startswith(head + ".") for o in owners):
            raise Problem(f"the model has no module '{head}' with parameters; it has: {', '.join(map(repr, owners))}")
        self.head_name = head = head or owners[-1]
        modules = dict(net.named_modules())
        norms = Norm | nn.GroupNorm | nn.LayerNorm | nn.modules.instancenorm._InstanceNorm
        self.head = self._part([o == head or o.startswith(head + ".") for o in owner])
        self.body = self._part([not (o == head or o.startswith(head + ".")) for o in owner])
        self.norm = self._part([isinstance(modules[o], norms) for o in owner])
        self.weights = self._part([name not in (*self._buffers, *frozen) for name in self.shapes])  # what is learned
        self.everything = self._part([True] * len(owner))
        index = torch.tensor([owners.index(o) if o in owners else -1 for o in owner] + [-1])
        self.layer = torch.repeat_interleave(index, torch.tensor(self._sizes)).to(self.device)  # [width], -1: no layer

    def _part(self, flags: list[bool]) -> Part:
        return Part(torch.repeat_interleave(torch.tensor([*flags, False]), torch.tensor(self._sizes)).to(self.device))

    @property
    def fixed(self) -> bool:
        """Whether theta has entries that are not learned: statistics, or parameters the user has frozen."""
        return self.Q > 0 or self.frozen

    @property
    def keyed(self) -> bool:
        """Whether a training step draws random numbers (dropout)."""
        return bool(self._keyed)

    def part(self, pattern: str) -> Part:
        """Entries by name: 'head', 'body', 'norm', 'none', or a pattern over names ('conv*', '*.bias'); '!' negates."""
        if pattern in ("head", "body", "norm"):
            return getattr(self, pattern)
        if pattern not in self._parts:
            self._parts[pattern] = self._match(pattern)
        return self._parts[pattern]

    def _match(self, pattern: str) -> Part:
        if pattern.startswith("!"):
            return Part(self.everything.mask & ~self.part(pattern[1:]).mask)
        if pattern == "none":
            return self._part([False] * len(self.shapes))
        flags = [fnmatch.fnmatch(n, pattern) or fnmatch.fnmatch(n.rpartition(".")[0], pattern) for n in self.shapes]
        if not any(flags):
            raise Problem(f"no parameter matches '{pattern}'; the model has: {', '.join(self.shapes)}")
        return self._part(flags)

    # ------------------------------------------------------------------ from and to ordinary modules

    def _fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def init(self, seed: int | Tensor) -> Tensor:
        """Theta of a freshly built network; the same seed gives the same numbers."""
        if isinstance(seed, Tensor):  # inside a batch of several runs: one of those that `seeds` names
            known = torch.tensor(self.seeds, device=self.device)
            return torch.stack([self.init(s) for s in self.seeds]).index_select(
                0, (known == seed).int().argmax(0, True)
            )[0]
        if seed not in self._inits:
            self._inits[seed] = self.flat(self._fresh(seed).state_dict())
        return self._inits[seed].clone()

    def zeros(self) -> Tensor:
        """An empty vector."""
        return torch.zeros(self.width, device=self.device, dtype=self.dtype)

    def flat(self, state: dict[str, Tensor]) -> Tensor:
        """Theta from a state dict."""
        missing = [name for name in self.shapes if name not in state]
        if missing:
            raise Problem(f"the saved model lacks {', '.join(missing)}")
        wrong = [name for name, shape in self.shapes.items() if state[name].shape != shape]
        if wrong:
            raise Problem(f"the saved model has other shapes for {', '.join(wrong)}")
        theta = self.zeros()
        theta[: self.size] = torch.cat([state[name].detach().reshape(-1).to(theta) for name in self.shapes])
        return theta

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """Theta as named tensors, each in its own memory."""
        pieces = zip(self.shapes.items(), theta.split(self._sizes), strict=False)  # the last piece is padding
        return {name: piece.detach().reshape(shape).clone() for (name, shape), piece in pieces}

    def module(self, theta: Tensor) -> nn.Module:
        """An ordinary nn.Module with these numbers, in eval mode."""
        net = self._fresh(seed=0).to(self.dtype)
        state = net.state_dict() | {name: t.cpu() for name, t in self.state_dict(theta).items()}
        net.load_state_dict(state)
        return net.eval()

    # ------------------------------------------------------------------ pure functions of theta

    def apply(
        self,
        theta: Tensor,
        x: Tensor,
        train: bool = False,
        weight: Tensor | None = None,
        key: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, Tensor]:
        """The network's output, and theta with fresh statistics (unchanged in eval mode)."""
        mode = "eval" if not train else "train" if weight is None else "weighted"
        pieces = theta.split(self._sizes)
        parts = {n: p.reshape(shape) for (n, shape), p in zip(self.shapes.items(), pieces, strict=False)}
        for name in self._buffers:
            parts[name] = parts[name].detach()  # statistics are measured, not learned
        if train:
            for name in self._buffers:
                # Updated in place below, so a copy; adding a zero of x makes it a row per client where x is one.
                parts[name] = parts[name] + torch.zeros_like(x.reshape(-1)[0], dtype=self.dtype)
            if weight is not None:
                parts |= {f"{name}.samples": weight for name in self._normed}
            for name in self._keyed:
                if key is None:
                    raise RuntimeError("dropout in training needs the batch's key: pass key=batch.key")
                parts[f"{name}.key"] = key
        out = self._call(mode, parts, x, options)
        if train and self.Q:
            fresh = [parts[name].reshape(-1) for name in self._buffers]
            theta = torch.cat([theta[: self.P].detach(), *fresh, pieces[-1].detach()])
        return out, theta

    def features(self, theta: Tensor, batch: Batch, train: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, what enters the head, theta with fresh statistics): the representation a sample has."""
        self._seen = seen = []
        try:
            out, theta = self.apply(theta, batch.x, train, batch.weight, batch.key)
        finally:
            self._seen = None
        return out, seen[0].flatten(1), theta

    def _look(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        # Hooked to the head once and for all: a hook that comes and goes cannot be compiled.
        if self._seen is not None:
            self._seen.append(inputs[0])

    def _find_slots(self, net: nn.Module) -> dict[str, list[tuple[dict[str, Any], str, Tensor]]]:
        """Where each tensor of the network is looked up: its module's own dictionaries, and what is in them."""
        slots: dict[str, list[tuple[dict[str, Any], str, Tensor]]] = {}
        names = {id(t): name for name, t in [*net.named_parameters(), *net.named_buffers()]}
        for module in net.modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        slots.setdefault(names[id(tensor)], []).append((table, key, tensor))  # tied weights: two slots
        return slots

    def _call(self, mode: str, parts: dict[str, Tensor], x: Tensor, options: dict[str, Any]) -> Any:
        for drop in self._drops[mode]:
            drop.calls = 0
        if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(x) or any(map(_wrapped, parts.values())):
            return functional_call(self._nets[mode], parts, (x,), options)
        # The same call without functional_call's bookkeeping, which costs as much as a small network does.
        filled = [(slot, tensor) for name, tensor in parts.items() for slot in self._slots[mode][name]]
        for (table, key, _), tensor in filled:
            table[key] = tensor
        try:
            return self._nets[mode](x, **options)
        finally:
            for (table, key, own), _ in filled:
                table[key] = own

    def loss(self, theta: Tensor, batch: Batch, train: bool = False) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of a batch, and theta with fresh statistics."""
        out, theta = self.apply(theta, batch.x, train, batch.weight, batch.key)
        return average(cross_entropy(out, batch.y), batch.weight), theta

    def grad(
        self,
        theta: Tensor,
        batch: Batch,
        loss: Callable[..., tuple[Tensor, Tensor]] | None = None,
        train: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, theta with this batch's statistics, loss); the gradient is 0 at buffers.

        Under vmap the functional gradient, which batches over clients; otherwise layer by layer (`cpu_backward.py`), or
        plain autograd. `loss(theta, batch, train)` may be given in place of `model.loss`.
        """
        line = self._straight.get("train" if train else "eval") if loss is None else None
        loss = loss or self.loss
        if torch.compiler.is_compiling() or _wrapped(theta) or _wrapped(batch.x):

            def value_and_rest(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                value, fresh = loss(theta, batch, train)
                return value, (fresh.detach(), value.detach())

            g, (fresh, value) = functional_grad(value_and_rest, has_aux=True)(theta)
        elif line is not None and line.fits(batch.x):
            fresh = theta
            g, value = line.grad(theta, batch.x, batch.y, batch.weight)
        else:
            leaf = theta.detach().requires_grad_()
            with torch.enable_grad():
                value, fresh = loss(leaf, batch, train)
            (g,) = torch.autograd.grad(value, leaf)
            value = value.detach()
        if self.frozen:
            g = self.weights.only(g)
        return g, (fresh.detach() if self.Q else theta), value


def _wrapped(tensor: Tensor) -> bool:
    return is_functorch_wrapped_tensor(tensor)
