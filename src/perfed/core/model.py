"""A model is a vector: any nn.Module as pure functions of one flat tensor `theta`.

`theta` holds P parameters, then Q float buffers (the running statistics of BatchNorm), then zeros up to a multiple of
four numbers (rows of a cohort then stay aligned in memory). Padding is in no part, no count and no message.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import functional_call, vmap
from torch.func import grad as functional_grad

from perfed.core.errors import Problem
from perfed.core.functions import Alike, plain_draw
from perfed.core.layers import Drop, Norm, swap
from perfed.core.task import Classification, Task
from perfed.core.tree import outside_transformations

ALIGN = 4
Loss = Callable[[Tensor, "Batch", bool], tuple[Tensor, Tensor]]  # (theta, batch, train) -> (value, theta)


class Batch(NamedTuple):
    """Hold some samples of one client.

    Attributes:
        x: inputs [samples, ...].
        y: labels [samples, ...], as the task has them: see perfed.core.task.
        weight: [samples], 0 for filling; None where every sample counts.
        key: what the random numbers of this step are drawn from.
        index: [samples], each one's number within the client's split, to look up what is known of it; filling has that
            of the first sample, as in x. None where a batch holds samples of several clients.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None
    key: Tensor
    index: Tensor | None = None  # pyright: ignore[reportIncompatibleMethodOverride] (nobody searches a batch)


def average(each: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean over the samples that count, of a number or a tensor for each: [samples, ...]."""
    if each.dim() > 1:
        return each.mean(0) if weight is None else torch.tensordot(weight, each, 1) / weight.sum()
    return each.mean() if weight is None else (each * weight).sum() / weight.sum()


@dataclass(frozen=True, eq=False)
class Part:
    """Select entries of theta: by a mask for arithmetic, by an index for messages.

    Attributes:
        mask: [width], True at the entries of this part.
    """

    mask: Tensor

    @cached_property
    def index(self) -> Tensor:
        """Return the places of the entries, ascending."""
        return self.mask.nonzero().flatten()

    def __len__(self) -> int:
        return int(self.mask.sum())

    def take(self, theta: Tensor) -> Tensor:
        """Return only these entries of `theta`: [len(part)]."""
        return theta.index_select(0, self.index)

    def put(self, theta: Tensor, values: Tensor) -> Tensor:
        """Return `theta` with these entries replaced by `values`, [len(part)]."""
        return theta.index_copy(0, self.index, values)

    def add(self, theta: Tensor, change: Tensor) -> Tensor:
        """Return `theta` with `change`, [len(part)], added to these entries."""
        return theta.index_add(0, self.index, change)

    def only(self, theta: Tensor, other: Tensor | float = 0.0) -> Tensor:
        """Return `theta` at these entries and `other` elsewhere."""
        return torch.where(self.mask, theta, other)


class _Head(nn.Module):
    """Run the head of a network alone."""

    def __init__(self, net: nn.Module, name: str):
        super().__init__()
        self.net, self.name = net, name

    def forward(self, z: Tensor) -> Tensor:
        return self.net.get_submodule(self.name)(z)


class Model:
    """Turn a network into pure functions of theta.

    Attributes:
        P, Q, size, sent, width: number of parameters, of float buffers, of both together, of those that training can
            change, and length of theta.
        shapes: name and shape of every tensor in theta, in order.
        moving, head, body, norm, weights, everything: parts of theta: what training can change, and of that the
            classifier, all else, the normalising layers, and what is learned (no buffers); and all but the padding.
        layers: names of the modules that own parameters, in order.
        layer: [width], the place in `layers` that each entry belongs to; -1: none.
        class_weights: [classes], what a sample's loss is multiplied by, by its class; None: nothing.
        inputs: shape of a sample; engines say it, and `features` where nobody has.
        tokens: True where a sample is made of whole numbers, which name things.
        task: what is learned: the loss of a sample, and what the outputs mean.
    """

    inputs: tuple[int, ...] | None = None
    tokens: bool = False

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        head: str = "",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        class_weights: Sequence[float] | None = None,
        apart: Collection[int] = (),
        task: Task | None = None,
        width: int = 0,
    ):
        """Make a model.

        Args:
            build: makes the network, which returns outputs as the task has them (logits [samples, classes]); called
                anew for every seed.
            head: name of the module that is the head; empty: the last module with parameters.
            dtype: type of theta.
            device: where theta is.
            class_weights: what a sample's loss is multiplied by, for each class; None: nothing.
            apart: lengths that theta must not have, for they are those of other models.
            task: what is learned; None: classes.
            width: length of theta, where it has to be longer than this network needs; 0: no longer.
        """
        if isinstance(build, nn.Module) or not callable(build):
            raise Problem(
                "Model needs a function that builds the network (each seed starts from its own), not a network"
            )
        self.build, self.dtype, self.device = build, dtype, torch.device(device)
        self.task = task or Classification()
        if class_weights is not None and not isinstance(self.task, Classification):
            raise Problem(f"only classes have weights in the loss, and the task is {self.task.kind}")
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=dtype, device=device)
        self._net = net = swap(self._fresh(seed=0)).to(self.device, dtype)
        frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
        net.requires_grad_(False)
        self._keyed = [name for name, m in net.named_modules() if isinstance(m, Drop)]
        self._normed = [name for name, m in net.named_modules() if isinstance(m, Norm)]
        # Whether `Alike` changes what it does, by mode and for many at once; and whether it draws: once it has run.
        self._calls: dict[tuple[str, bool], bool] = {}
        self._drew: dict[str, bool] = {}
        self._seen: _Seen | None = None

        params = {name: p.shape for name, p in net.named_parameters()}
        kept = net.state_dict()  # buffers that are not saved, such as tables of positions, are constants
        buffers = {n: b.shape for n, b in net.named_buffers() if b.is_floating_point() and n in kept}
        if not params:
            raise Problem("the model has no parameters")
        self.shapes = params | buffers
        self._buffers = list(buffers)
        self.P = sum(math.prod(s) for s in params.values())
        self.Q = sum(math.prod(s) for s in buffers.values())
        self.size = self.P + self.Q
        self.width = max(-(-self.size // ALIGN) * ALIGN, width)
        while self.width in apart:
            self.width += ALIGN
        self._sizes = [math.prod(s) for s in self.shapes.values()] + [self.width - self.size]
        self._inits: dict[int, Tensor] = {}
        self._parts: dict[str, Part] = {}
        self.frozen = bool(frozen)
        net.train()  # a network may keep layers as they are in an evaluation
        still = [name for name in buffers if not net.get_submodule(name.rpartition(".")[0]).training]
        self._name_parts(net, head, frozen, still)
        self.sent = len(self.moving)
        self._head = _Head(net, self.head_name)

    def _name_parts(self, net: nn.Module, head: str, frozen: list[str], still: list[str]) -> None:
        owner = [name.rpartition(".")[0] for name in self.shapes]
        owners = list(dict.fromkeys(owner[: len(self.shapes) - len(self._buffers)]))
        self.layers = owners
        if head and not any(o == head or o.startswith(head + ".") for o in owners):
            raise Problem(f"the model has no module '{head}' with parameters; it has: {', '.join(map(repr, owners))}")
        self.head_name = head = head or owners[-1]
        modules = dict(net.named_modules())
        norms = Norm | nn.GroupNorm | nn.LayerNorm | nn.modules.instancenorm._InstanceNorm
        self.everything = Part(self._mask([True] * len(owner)))
        self.moving = Part(self._mask([name not in (*frozen, *still) for name in self.shapes]))
        self.head = self._part([o == head or o.startswith(head + ".") for o in owner])
        self.body = self._part([not (o == head or o.startswith(head + ".")) for o in owner])
        self.norm = self._part([isinstance(modules[o], norms) for o in owner])
        self.weights = self._part([name not in self._buffers for name in self.shapes])
        index = torch.tensor([owners.index(o) if o in owners else -1 for o in owner] + [-1])
        self.layer = torch.repeat_interleave(index, torch.tensor(self._sizes)).to(self.device)

    def _mask(self, flags: list[bool]) -> Tensor:
        return torch.repeat_interleave(torch.tensor([*flags, False]), torch.tensor(self._sizes)).to(self.device)

    def _part(self, flags: list[bool]) -> Part:
        return Part(self._mask(flags) & self.moving.mask)

    @property
    def fixed(self) -> bool:
        """Return True if theta has entries that are not learned: statistics, or parameters the user has frozen."""
        return self.Q > 0 or self.frozen

    @property
    def keyed(self) -> bool:
        """Return True if a training step draws random numbers (dropout), as far as that is known."""
        return bool(self._keyed) or self.draws

    @property
    def draws(self) -> bool:
        """Return True if functions drew random numbers in training: dropout that is no module."""
        return any(self._drew.values())

    @property
    def tried(self) -> bool:
        """Return True if a training pass has run, so that `draws` is known."""
        return bool(self._drew)

    def part(self, pattern: str) -> Part:
        """Select entries of theta by name, but for those that never change: frozen parameters, which everybody has.

        Args:
            pattern: 'head', 'body', 'norm', 'none', or a pattern over names of tensors and modules ('conv*', '*.bias');
                several with commas between them; a '!' in front takes everything else.

        Returns:
            The part; a pattern that matches nothing is a Problem.
        """
        if pattern in ("head", "body", "norm"):
            return getattr(self, pattern)
        if pattern not in self._parts:
            self._parts[pattern] = self._match(pattern)
        return self._parts[pattern]

    def _match(self, pattern: str) -> Part:
        if pattern.startswith("!"):
            return Part(self.moving.mask & ~self.part(pattern[1:]).mask)
        if "," in pattern:
            return Part(torch.stack([self.part(each.strip()).mask for each in pattern.split(",")]).any(0))
        if pattern == "none":
            return self._part([False] * len(self.shapes))
        flags = [fnmatch.fnmatch(n, pattern) or fnmatch.fnmatch(n.rpartition(".")[0], pattern) for n in self.shapes]
        if not any(flags):
            raise Problem(f"no parameter matches '{pattern}'; the model has: {', '.join(self.shapes)}")
        return self._part(flags)

    def like(self, build: Callable[[], nn.Module], apart: Collection[int] = ()) -> Model:
        """Return a model of this kind for another network, which runs as it is written.

        Args:
            build: makes the network.
            apart: as for a new model.
        """
        weights = None if self.class_weights is None else self.class_weights.tolist()
        kind = {"dtype": self.dtype, "device": self.device, "class_weights": weights, "task": self.task}
        return Model(build, **kind, apart=apart)

    # ------------------------------------------------------------------ from and to ordinary modules

    def _fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def init(self, seed: int) -> Tensor:
        """Return theta of a network freshly built from `seed`; equal seeds give equal numbers."""
        if seed not in self._inits:
            with outside_transformations():  # it may be a client's, under vmap, that asks first
                self._inits[seed] = self.flat(self._fresh(seed).state_dict())
        return self._inits[seed].clone()

    def zeros(self) -> Tensor:
        """Return a theta of zeros."""
        return torch.zeros(self.width, device=self.device, dtype=self.dtype)

    def flat(self, state: dict[str, Tensor]) -> Tensor:
        """Return theta with the numbers of a state dict."""
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
        """Return `theta` as named tensors, each in its own memory."""
        pieces = zip(self.shapes.items(), theta.split(self._sizes), strict=False)  # the last piece is padding
        return {name: piece.detach().reshape(shape).clone() for (name, shape), piece in pieces}

    def module(self, theta: Tensor) -> nn.Module:
        """Return an ordinary nn.Module with the numbers of `theta`, in eval mode."""
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
        """Run the network.

        Args:
            theta: the model.
            x: inputs [samples, ...].
            train: use the statistics of this batch, and dropout.
            weight: of each sample in the statistics; None: all count alike.
            key: what dropout is drawn from.
            options: further arguments of the network's forward.

        Returns:
            The network's output, and theta with fresh statistics (unchanged in eval mode).
        """
        mode = "eval" if not train else "train" if weight is None else "weighted"
        parts = self._tensors(theta)
        if train:
            for name in self._buffers:
                # Updated in place below, so a copy; adding a zero of x makes it a row per client where x has rows.
                parts[name] = parts[name] + torch.zeros_like(x.reshape(-1)[0], dtype=self.dtype)
            if weight is not None:
                parts |= {f"{name}.samples": weight for name in self._normed}
            for name in self._keyed:
                if key is None:
                    raise RuntimeError("dropout in training needs the batch's key: pass key=batch.key")
                parts[f"{name}.key"] = key
        out = self._run(mode, parts, x, options, key)
        if train and self.Q:
            fresh = [parts[name].reshape(-1) for name in self._buffers]
            theta = torch.cat([theta[: self.P].detach(), *fresh, theta[self.size :].detach()])
        return out, theta

    def _tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the network."""
        pieces = theta.split(self._sizes)
        parts = {n: p.reshape(shape) for (n, shape), p in zip(self.shapes.items(), pieces, strict=False)}
        for name in self._buffers:
            parts[name] = parts[name].detach()  # statistics are measured, not learned
        return parts

    def _run(self, mode: str, parts: dict[str, Tensor], x: Tensor, options: dict[str, Any], key: Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # a compiler cannot follow what comes next
            return self._call(mode, parts, x, options)
        # A network is watched once in each mode: those that call no such function run without the cost of watching.
        batched, trains = any(map(is_functorch_wrapped_tensor, (x, *parts.values()))), mode not in ("eval", "head")
        if not self._calls.get((mode, batched), True) or not (trains or batched):
            return self._call(mode, parts, x, options)  # an evaluation of one client is PyTorch's own
        with Alike(key, trains, self._draw) as functions:
            out = self._call(mode, parts, x, options)
        self._calls[mode, batched] = functions.drew or (functions.met and batched)
        if trains:
            self._drew[mode] = functions.drew
        return out

    _draw = staticmethod(plain_draw)

    def _call(self, mode: str, parts: dict[str, Tensor], x: Tensor, options: dict[str, Any]) -> Any:
        return functional_call(self._network(mode), parts, (x,), options)

    def _network(self, mode: str) -> nn.Module:
        """Return the network, ready for a call in mode 'eval', 'train' or 'weighted' (training with weights).

        In mode 'head' it is the head alone, as in 'eval'.
        """
        for module in self._net.train(mode not in ("eval", "head")).modules():
            if isinstance(module, Norm):
                module.weighted = mode == "weighted"
            elif isinstance(module, Drop):
                module.calls = 0
        return self._head if mode == "head" else self._net

    def features(self, theta: Tensor, batch: Batch | Tensor, train: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Run the network and look at what enters its head, the representation that a sample has.

        Args:
            theta: the model.
            batch: the samples; outside of training their inputs are enough.
            train: use the statistics of this batch, and dropout.

        Returns:
            Logits, the head's input [samples, features], and theta with fresh statistics.
        """
        seen: list[Tensor] = []
        head = self._net.get_submodule(self.head_name)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            out, theta = self._run_on(theta, batch, train)
        finally:
            hook.remove()
        return out, seen[0].flatten(1), theta

    def _run_on(self, theta: Tensor, batch: Batch | Tensor, train: bool) -> tuple[Any, Tensor]:
        x, weight, key = (batch, None, None) if isinstance(batch, Tensor) else (batch.x, batch.weight, batch.key)
        self._take(x)
        return self.apply(theta, x, train, weight, key)

    def _take(self, x: Tensor) -> None:
        self.inputs = tuple(x.shape[1:]) if self.inputs is None else self.inputs

    def taking(self, inputs: tuple[int, ...], tokens: bool = False) -> Self:
        """Return this model, knowing the shape of a sample, and whether it is made of tokens."""
        other = copy.copy(self)
        other.inputs, other.tokens = inputs, tokens
        return other

    @property
    def outputs(self) -> int:
        """Return how many numbers the network returns for a sample."""
        return _look(self).outputs

    @property
    def representation(self) -> tuple[int, ...]:
        """Return the shape of what enters the head for a sample."""
        return _look(self).representation

    def classify(self, theta: Tensor, z: Tensor) -> Tensor:
        """Return the network's outputs for representations, which the head alone turns into them.

        Dropout and statistics of the head are as in an evaluation. A network that does something after its head is
        refused.

        Args:
            theta: the model.
            z: [samples, features], as `features` returns it.

        Returns:
            [samples, classes], with gradients for z and for the head's entries of theta.
        """
        seen = _look(self)
        if not seen.ends:
            raise Problem(
                f"the network does not end with its head '{self.head_name}', so its outputs do not follow from what "
                "enters it: make the head the last thing that `forward` does, on one tensor"
            )
        parts = {f"net.{name}": part for name, part in self._tensors(theta).items()}
        return self._run("head", parts, z.unflatten(1, seen.representation), {}, None)

    def loss(self, theta: Tensor, batch: Batch, train: bool = False) -> tuple[Tensor, Tensor]:
        """Return the mean of the task's loss over a batch, and theta with fresh statistics if `train`."""
        out, theta = self.apply(theta, batch.x, train, batch.weight, batch.key)
        return average(self.by_class(self._losses(out, batch.y), batch.y), batch.weight), theta

    def by_class(self, each: Tensor, y: Tensor) -> Tensor:
        """Return the losses of samples, each times the weight of its class where classes have weights.

        A method with a loss of its own calls it before it averages. The sum is divided by the number of samples, not by
        their weights, so that the mean over all samples is the mean of any pieces.

        Args:
            each: [samples], the losses.
            y: the labels: classes [samples], where they have weights.
        """
        return each if self.class_weights is None else each * self.class_weights[y]

    def _losses(self, out: Tensor, y: Tensor) -> Tensor:
        return self.task.losses(out, y)

    def grad(
        self, theta: Tensor, batch: Batch, loss: Loss | None = None, train: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of a batch's loss.

        Args:
            theta: the model.
            batch: the samples.
            loss: `loss(theta, batch, train)` in place of `model.loss`; it returns (value, theta with fresh statistics).
            train: use the statistics of this batch, and dropout.

        Returns:
            The gradient (0 where theta is not learned), theta with fresh statistics, and the loss.
        """
        function = loss or self.loss

        def value_and_rest(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            value, fresh = function(theta, batch, train)
            return value, (fresh.detach(), value.detach())

        g, (fresh, value) = functional_grad(value_and_rest, has_aux=True)(theta)
        return self._learned(g), (fresh if self.Q else theta), value

    def grads(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of each sample's loss: [samples, width], 0 where theta is not learned.

        Dropout and statistics are as in an evaluation, so that samples do not depend on each other. It takes as much
        memory as a model for each sample: `data.mean(..., chunk=8)` bounds how many there are.

        Args:
            theta: the model.
            batch: the samples; those that fill it up have gradients, too.
        """

        def one(x: Tensor, y: Tensor) -> Tensor:
            single = Batch(x[None], y[None], None, batch.key)
            return functional_grad(lambda theta: self.loss(theta, single)[0])(theta)

        return self._learned(vmap(one)(batch.x, batch.y))

    def _learned(self, g: Tensor) -> Tensor:
        return self.weights.only(g) if self.frozen else g


class _Seen(NamedTuple):
    """What one sample shows of a network."""

    outputs: int
    representation: tuple[int, ...]
    ends: bool  # whether its outputs are those of its head


def _look(model: Model) -> _Seen:
    """Run a network once on a sample of ones, and watch its head."""
    if model._seen is not None:
        return model._seen
    if model.inputs is None:
        raise Problem("the shape of the samples is not known yet: it is from `init_server` on")
    entered: list[Tensor] = []
    left: list[Any] = []
    head = model._network("eval").get_submodule(model.head_name)
    hooks = [
        head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0])),
        head.register_forward_hook(lambda _, __, output: left.append(output)),
    ]
    try:
        with outside_transformations(), torch.no_grad():
            dtype = torch.int64 if model.tokens else model.dtype
            # Of zeros, which may be padding, nothing would be left.
            x = torch.ones(1, *model.inputs, dtype=dtype, device=model.device)
            out, _ = model.apply(model.init(0), x)
    finally:
        for hook in hooks:
            hook.remove()
    ends = len(left) == 1 and left[0] is out and len(entered[0]) == 1
    model._seen = _Seen(out.shape[-1], tuple(entered[0].shape[1:]), ends)
    return model._seen


_look._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] (hooks cannot be compiled)
