"""Gradients of straight networks without autograd: layer after layer, each with its own backward pass.

For a small network on a CPU, autograd's bookkeeping costs as much as the arithmetic. Most federated networks are a
straight line of convolutions, pools, linear layers and ReLU; for these the backward pass is a few calls, and each
layer's gradient goes where it belongs in the flat vector. Everything else takes autograd, which gives the same numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._utils import _unflatten_dense_tensors as views  # all views of a flat tensor in one call

from perfed.accel.fused_layers import Conv, hooked, kind_of, layout, trace

_ATEN = torch.ops.aten
_TWO, _NONE, _ONE = [2, 2], [0, 0], [1, 1]


class Plain(NamedTuple):
    """Hold the two passes of a layer without parameters."""

    forward: Callable[[Tensor], tuple[Tensor, Any]]  # the output, and what `backward` needs
    backward: Callable[[Tensor, Any], Tensor]


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.relu_()  # nobody else has x
    return x, x


def _max(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    y, winners = _ATEN.max_pool2d_with_indices.default(x, _TWO, _TWO)
    return y, (x, winners)


def _max_backward(d: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
    x, winners = seen
    return _ATEN.max_pool2d_with_indices_backward.default(d, x, _TWO, _TWO, _NONE, _ONE, False, winners)


RELU = Plain(_relu, lambda d, seen: _ATEN.threshold_backward.default(d, seen, 0))
FLAT = Plain(lambda x: (x.flatten(1), x.shape), lambda d, shape: d.view(shape))
MAX = Plain(_max, _max_backward)
AVG = Plain(
    lambda x: (F.avg_pool2d(x, 2), x),
    lambda d, seen: _ATEN.avg_pool2d_backward.default(d, seen, _TWO, _TWO, _NONE, False, True, None),
)


class Linear:
    """Run a linear layer on rows; its weight has this place among the network's parameters, its bias the next one."""

    def __init__(self, place: int, layer: nn.Linear | Conv):
        self.place, self.bias = place, layer.bias is not None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs."""
        return (x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())), x

    def backward(
        self, d: Tensor, seen: Any, weight: Tensor, g_weight: Tensor, g_bias: Tensor | None, first: bool
    ) -> Tensor:
        """Write the parameters' gradients, and return the input's, which the first layer has no use for."""
        torch.mm(d.t(), seen, out=g_weight)
        if g_bias is not None:
            torch.sum(d, 0, out=g_bias)
        return d if first else d.mm(weight)


class Convolution(Linear):
    """Run the convolution of a fused layer, whose ReLU and pool are layers of their own here."""

    def __init__(self, place: int, layer: Conv):
        super().__init__(place, layer)
        self.stride, self.padding = list(layer.stride), list(layer.padding)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs."""
        x, weight = layout(x, weight)
        return F.conv2d(x, weight, bias, self.stride, self.padding), (x, weight)

    def backward(
        self, d: Tensor, seen: Any, weight: Tensor, g_weight: Tensor, g_bias: Tensor | None, first: bool
    ) -> Tensor:
        """Write the parameters' gradients, and return the input's; the weight is taken in the layout of `forward`."""
        x, weight = seen
        need = [not first, True, g_bias is not None]
        d, of_weight, of_bias = _ATEN.convolution_backward.default(
            d, x, weight, [len(weight)], self.stride, self.padding, _ONE, False, _NONE, 1, need
        )
        g_weight.copy_(of_weight)
        if g_bias is not None:
            g_bias.copy_(of_bias)
        return d


class Straight:
    """Compute loss and gradient of a network whose layers follow one another."""

    def __init__(self, layers: list[Plain | Linear], shapes: Iterable[Any], parameters: int, dims: int):
        self.layers, self.P, self.dims = layers, parameters, dims
        self.first = next(depth for depth, layer in enumerate(layers) if isinstance(layer, Linear))  # with parameters
        self.like = tuple(torch.empty(shape, device="meta") for shape in shapes)

    def fits(self, x: Tensor) -> bool:
        """Return True if the layers can take this input as it is."""
        return not self.dims or x.dim() == self.dims

    @torch.no_grad()
    def grad(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the mean cross-entropy, and the loss.

        Args:
            theta: the model.
            x: inputs.
            y: labels.
            weight: 0 for filling; None where every sample counts.
            factor: what each sample's loss is multiplied by; None: nothing.
        """
        theta = theta.contiguous()
        own = views(theta, self.like)
        seen = []
        for layer in self.layers:
            if isinstance(layer, Plain):
                x, kept = layer.forward(x)
            else:
                x, kept = layer.forward(x, own[layer.place], own[layer.place + 1] if layer.bias else None)
            seen.append(kept)
        logp = x.log_softmax(1)
        if weight is None and factor is None:
            value, count = _ATEN.nll_loss_forward.default(logp, y, None, 1, -100)
            d = _ATEN.nll_loss_backward.default(_one(logp.dtype, logp.device), logp, y, None, 1, -100, count)
        else:
            share = torch.full_like(logp[:, 0], 1 / len(y)) if weight is None else weight / weight.sum()
            share = share if factor is None else share * factor
            value = (F.nll_loss(logp, y, reduction="none") * share).sum()
            d = torch.zeros_like(logp).scatter_(1, y[:, None], -share[:, None])
        d = _ATEN._log_softmax_backward_data.default(d, logp, 1, logp.dtype)
        g = torch.empty_like(theta)
        g[self.P :] = 0
        into = views(g, self.like)
        for depth in range(len(self.layers) - 1, self.first - 1, -1):
            layer, kept = self.layers[depth], seen[depth]
            if isinstance(layer, Plain):
                d = layer.backward(d, kept)
            else:
                bias = into[layer.place + 1] if layer.bias else None
                d = layer.backward(d, kept, own[layer.place], into[layer.place], bias, depth == self.first)
        return g, value


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def straighten(net: nn.Module, shapes: dict[str, Any], parameters: int) -> Straight | None:
    """Return the network as a straight line, or None where it is none."""
    graph = trace(net)
    if graph is None:
        return None
    _flatten_views(graph)
    modules, places = dict(net.named_modules()), {name: place for place, name in enumerate(shapes)}
    layers: list[Plain | Linear] = []
    used: list[str] = []
    first, *nodes, last = graph.nodes
    for before, node in zip([first, *nodes], [*nodes, last], strict=True):
        if list(before.users) != [node] or node.all_input_nodes != [before]:
            return None
        if node is last:
            break
        new = _layers(node, modules, places)
        if new is None:
            return None
        layers += new
        if node.op == "call_module":
            used += [f"{node.target}.{name}" for name, _ in modules[str(node.target)].named_parameters()]
    # Each parameter must be used once: twice would overwrite its gradient, and unused it would have none.
    if sorted(used) != sorted(dict(net.named_parameters())) or (dims := _dims(layers)) is None:
        return None
    return Straight(layers, list(shapes.values()), parameters, dims)


def _flatten_views(graph: fx.Graph) -> None:
    """Rewrite `x.view(x.size(0), -1)`, as many have it, to `x.flatten(1)`."""
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in ("view", "reshape") and node.args[2:] == (-1,):
            asked = _samples(node.args[1], node.args[0])
            if asked:
                node.target, node.args = "flatten", (node.args[0], 1)
                for unused in (n for n in asked if not n.users):
                    graph.erase_node(unused)


def _samples(size: Any, x: Any) -> list[fx.Node]:
    """Return the nodes that ask how many samples x has, if that is what `size` is."""
    if isinstance(size, fx.Node):
        if (size.target, size.args) == ("size", (x, 0)):
            return [size]
        shape = size.args[0] if size.target is operator.getitem and size.args[1] == 0 else None
        if isinstance(shape, fx.Node) and (shape.target, shape.args) == (getattr, (x, "shape")):
            return [size, shape]
    return []


def _dims(layers: list[Plain | Linear]) -> int | None:
    """Return how many dimensions the input must have, 0 for any; None if no input fits, or samples have no rows."""
    first = now = 0
    fresh = False  # ReLU writes in place, so a layer before it must have made something new
    for layer in layers:
        wants = 4 if isinstance(layer, Convolution) or layer in (MAX, AVG) else 2 if isinstance(layer, Linear) else 0
        if (now and wants and now != wants) or (layer is RELU and not fresh):
            return None
        first = first or (0 if now else wants)
        now = 2 if layer is FLAT else wants or now
        fresh = fresh or isinstance(layer, Linear)
    return first if now == 2 else None


def _layers(node: fx.Node, modules: dict[str, nn.Module], places: dict[str, int]) -> list[Plain | Linear] | None:
    kind = kind_of(node, modules)
    if kind is not None:
        return [{"relu": RELU, "max": MAX, "avg": AVG}[kind]]
    if node.op != "call_module":
        flat = (node.op, node.target, node.args[1:], node.kwargs)
        known = [("call_method", "flatten", (1,), {}), ("call_function", torch.flatten, (1,), {})]
        return [FLAT] if flat in known else None
    module = modules[str(node.target)]
    if hooked(module) or len(node.args) != 1 or node.kwargs:
        return None
    place = places.get(f"{node.target}.weight", -1)
    if getattr(module, "bias", None) is not None and places.get(f"{node.target}.bias") != place + 1:
        return None
    if type(module) is nn.Linear:
        return [Linear(place, module)]
    if isinstance(module, Conv):
        relu, most, mean = [RELU] * module.relu, [MAX] * (module.pool == "max"), [AVG] * (module.pool == "avg")
        return [Convolution(place, module), *most, *relu, *mean]
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return [FLAT]
    return [] if type(module) is nn.Identity else None
