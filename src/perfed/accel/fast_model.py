"""The model that engines work with: a Model whose functions of theta take less time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from perfed.accel import cpu_backward, fused_layers
from perfed.core.functions import plain_draw
from perfed.core.layers import Drop
from perfed.core.model import Batch, Loss, Model, _Head
from perfed.core.task import Classification

Slot = tuple[dict[str, Any], str, Tensor]  # a module's dictionary, a key of it, and the network's own tensor there


class FastModel(Model):
    """Compute what a Model computes, in less time.

    Convolution, ReLU and pooling are one layer (`fused_layers`), and a network that is a straight line has a backward
    pass without autograd (`cpu_backward`). With `kernels`, layers run a whole cohort at once under vmap
    (`cohort_layers`). It concerns this model's own copies of the network alone, not other models in the process.
    """

    def __init__(self, model: Model, kernels: bool = False, fused: bool = True):
        """Make a model.

        Args:
            model: what is to be fast; it stays as it is, and everything that is known of theta is shared with it.
            kernels: use kernels for whole cohorts; needs Triton.
            fused: fuse layers; False keeps the network as it was written.
        """
        vars(self).update(vars(model))
        self.plain = model
        self._nets = {mode: copy.deepcopy(model._network(mode)) for mode in ("eval", "train", "weighted")}
        self._straight: dict[str, cpu_backward.Straight | None] = {}
        if fused:
            self._nets = {mode: fused_layers.rewrite(net, self.head_name) for mode, net in self._nets.items()}
            for mode in ("eval", "train") if isinstance(self.task, Classification) else ():
                self._straight[mode] = cpu_backward.straighten(self._nets[mode], self.shapes, self.P)
        self._cohort_layers: Any = None
        if kernels:
            from perfed.accel import cohort_layers  # needs Triton

            self._cohort_layers = cohort_layers
            for net in self._nets.values():
                cohort_layers.use_kernels(net)
        self._drops = {mode: [m for m in n.modules() if isinstance(m, Drop)] for mode, n in self._nets.items()}
        self._slots = {mode: _find_slots(net) for mode, net in self._nets.items()}
        self._watchers: list[list[Tensor]] = []  # where `features` wants to have what enters the head
        for net in self._nets.values():
            net.get_submodule(self.head_name).register_forward_pre_hook(self._watch)
        self._nets["head"] = head = _Head(self._nets["eval"], self.head_name)
        self._drops["head"], self._slots["head"] = self._drops["eval"], _find_slots(head)

    @classmethod
    def of(cls, model: Model, kernels: bool = False) -> Model:
        """Return a fast model for an engine; a model of somebody's own class stays what it is."""
        plain = model.plain if isinstance(model, FastModel) else model
        return cls(plain, kernels) if type(plain) is Model else plain

    def like(self, build: Callable[[], nn.Module], apart: Collection[int] = ()) -> FastModel:
        """Return a model with the same kernels for another network, which runs as it is written."""
        return FastModel(self.plain.like(build, apart), kernels=self._cohort_layers is not None, fused=False)

    def _network(self, mode: str) -> nn.Module:
        for drop in self._drops[mode]:
            drop.calls = 0
        return self._nets[mode]

    def _call(self, mode: str, parts: dict[str, Tensor], x: Tensor, options: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or is_wrapped(x) or any(map(is_wrapped, parts.values())):
            return super()._call(mode, parts, x, options)
        # The same call without functional_call's bookkeeping, which costs as much as a small network does.
        filled = [(slot, tensor) for name, tensor in parts.items() for slot in self._slots[mode][name]]
        for (table, key, _), tensor in filled:
            table[key] = tensor
        try:
            return self._network(mode)(x, **options)
        finally:
            for (table, key, own), _ in filled:
                table[key] = own

    def features(self, theta: Tensor, batch: Batch | Tensor, train: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `Model.features` does, with hooks that stay: one that comes and goes cannot be compiled."""
        seen: list[Tensor] = []
        self._watchers.append(seen)
        try:
            out, theta = self._run_on(theta, batch, train)
        finally:
            self._watchers.pop()
        return out, seen[0].flatten(1), theta

    def _watch(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        for seen in self._watchers:
            seen.append(inputs[0])

    def _draw(self, like: Tensor, key: Tensor, salt: int, call: int, shape: tuple[int, ...]) -> Tensor:
        return (self._cohort_layers.draw if self._cohort_layers else plain_draw)(like, key, salt, call, shape)

    def _losses(self, out: Tensor, y: Tensor) -> Tensor:
        return self.task.losses(out, y, self._cohort_layers) if self._cohort_layers else super()._losses(out, y)

    def grad(
        self, theta: Tensor, batch: Batch, loss: Loss | None = None, train: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `Model.grad` does: under vmap in the same way, otherwise layer by layer or with plain autograd."""
        if torch.compiler.is_compiling() or is_wrapped(theta) or is_wrapped(batch.x):
            return super().grad(theta, batch, loss, train)
        line = self._straight.get("train" if train else "eval") if loss is None else None
        if line is not None and line.fits(batch.x):
            factor = None if self.class_weights is None else self.class_weights[batch.y]
            g, value = line.grad(theta, batch.x, batch.y, batch.weight, factor)
            return self._learned(g), (theta.detach() if self.Q else theta), value
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            value, fresh = (loss or self.loss)(leaf, batch, train)
        (g,) = torch.autograd.grad(value, leaf)
        return self._learned(g), (fresh.detach() if self.Q else theta), value.detach()


def _find_slots(net: nn.Module) -> dict[str, list[Slot]]:
    """Find where each tensor of a network is looked up: in two places, where weights are tied."""
    slots: dict[str, list[Slot]] = {}
    names = {tensor: name for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    for module in net.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    slots.setdefault(names[tensor], []).append((table, key, tensor))
    return slots
