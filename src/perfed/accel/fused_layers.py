"""Convolution, ReLU and 2x2 pooling as one layer; `rewrite` puts it into a network that was written in any way.

It computes what its layers did, in an order and a memory layout that cost less: on a CPU channels last, and the maximum
of a window before its ReLU (the two commute), so that ReLU sees a quarter of the numbers.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.proxy import TraceError

from perfed.core import layers

Pool = Literal["max", "avg"] | None


class Conv(nn.Module):
    """Run a Conv2d, then ReLU where `relu`, then 2x2 pooling where `pool`; its parameters are the Conv2d's own."""

    def __init__(self, old: nn.Conv2d, relu: bool = False, pool: Pool = None):
        super().__init__()
        self.weight, self.bias = old.weight, old.bias
        self.stride, self.padding, self.dilation, self.groups = old.stride, _padding(old), old.dilation, old.groups
        self.relu, self.pool = relu, pool
        self.flat = False  # whether its output is flattened next
        self.training = old.training

    def forward(self, x: Tensor) -> Tensor:
        x, weight = layout(x, self.weight)
        x = F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if self.pool == "max":
            x = F.max_pool2d(x, 2)
        if self.relu:
            x = F.relu(x)
        return F.avg_pool2d(x, 2) if self.pool == "avg" else x


def layout(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Lay both out with channels last where that pays: float32 on a CPU, and nothing that is batched or compiled."""
    pays = (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.dim() == 4
        and not torch.compiler.is_compiling()
        and not (is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(weight))
    )
    if not pays:
        return x, weight
    return x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)


def _padding(conv: nn.Conv2d) -> tuple[int, ...]:
    """Return the zeros on each side."""
    if not isinstance(conv.padding, str):
        return conv.padding
    return (0, 0) if conv.padding == "valid" else tuple(k // 2 for k in conv.kernel_size)


def _known(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d  # a subclass, such as one with a parametrised weight, does something else
        and module.padding_mode == "zeros"
        and module.dilation == (1, 1)
        and module.groups == 1
        and (module.padding != "same" or all(k % 2 for k in module.kernel_size))  # else the sides differ
        and not hooked(module)
    )


def hooked(module: nn.Module) -> bool:
    """Return True if a call of this module does more than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") or _ours(module)


def _ours(module: nn.Module) -> bool:
    """Return True if this layer was swapped in by perfed: it takes any layout and is not looked into."""
    return type(module).__module__ in (layers.__name__, __name__)


# ---------------------------------------------------------------------- rewriting a network


class _Tracer(fx.Tracer):
    def __init__(self, head: str):
        super().__init__()
        self.head, self.begun = head, _surroundings()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Hooks belong to calls of modules: one that is looked into is no longer called.
        whole = module_qualified_name == self.head or hooked(m) or _ours(m)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _surroundings() != self.begun:  # a graph knows of no `with`: it would train what is to be frozen
            raise TraceError("the network's code changes how PyTorch works (no_grad, autocast)")
        return super().create_node(*args, **kwargs)


def _surroundings() -> tuple[Any, ...]:
    """Return what a `with` around operations changes: gradients, and the numbers they are computed in."""
    casts = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts


def trace(net: nn.Module, head: str = "") -> fx.Graph | None:
    """Return what the network computes, as a graph of calls; None where its code depends on values."""
    if hooked(net):
        return getattr(net, "traced", None)  # left there by `rewrite`
    try:
        return _Tracer(head).trace(copy.deepcopy(net))  # a copy: tracing may leave things behind
    except Exception:  # the network's own code ran with placeholders for tensors: anything can happen
        return None


def rewrite(net: nn.Module, head: str = "") -> nn.Module:
    """Fuse the convolutions of a network with what follows them, in place.

    Modules, names and hooks stay where they are, and so do calls of the module `head`. A layer that is not understood
    stays as it is, and so does a whole network whose code depends on values.
    """
    graph = trace(net, head) if any(map(_known, net.modules())) else None
    if graph is None:
        return net
    modules = dict(net.named_modules(remove_duplicate=False))
    if not all(_stays(node, net) for node in graph.nodes):
        return net
    made = _fuse(graph, modules)
    if not made:
        return net
    _free_of_layout(graph, modules)
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    # The traced code runs on the network itself, so that everything in it keeps its place.
    net.forward = types.MethodType(type(fx.GraphModule(net, graph)).forward, net)
    net.traced = graph  # pyright: ignore[reportArgumentType]
    return net


def _stays(node: fx.Node, net: nn.Module) -> bool:
    """Return True if this node means the same in another layout and is nothing that tracing has made up."""
    if node.op == "get_attr":  # a tensor that is made in the code, not part of the network, would become a constant
        owner: Any = net
        for part in str(node.target).split("."):
            owner = getattr(owner, part, None)
        return owner is not None
    return node.op not in ("call_method", "call_function") or _name(node) not in _LAYOUT


_LAYOUT = ("as_strided", "as_strided_", "stride", "is_contiguous", "data_ptr", "storage", "storage_offset", "set_")
_RESHAPES = {"view": "reshape", "view_as": "reshape_as"}  # to what works in any layout


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _free_of_layout(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Let code that was written for tensors in the usual layout take others."""
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _RESHAPES:
            if not any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
                node.target = _RESHAPES[node.target]
        elif node.op == "call_module" and not all(map(_torch, modules[node.target].modules())):
            with graph.inserting_before(node):  # its code is not in the graph
                fx.map_arg(node.args, lambda arg, n=node: n.replace_input_with(arg, graph.call_function(usual, (arg,))))


def usual(value: Any) -> Any:
    """Return a tensor in the usual layout; anything else as it is."""
    return value.contiguous() if isinstance(value, Tensor) else value


class _Chain(NamedTuple):
    """List what follows a convolution and can be fused with it."""

    relu: bool = False
    pool: Pool = None
    tail: tuple[fx.Node, ...] = ()  # the nodes after the convolution that it swallows


def _fuse(graph: fx.Graph, modules: dict[str, nn.Module]) -> dict[nn.Module, Conv]:
    """Shorten the graph, and return the layer that replaces each convolution."""
    calls: dict[nn.Module, list[fx.Node]] = {}
    inside: set[nn.Module] = set()  # of modules that are called as a whole: other code uses these too
    for node in graph.nodes:
        if node.op == "call_module":
            module = modules[node.target]
            calls.setdefault(module, []).append(node)
            inside.update(m for m in module.modules() if m is not module)
    made: dict[nn.Module, Conv] = {}
    for module, nodes in calls.items():
        if not _known(module) or module in inside or any(len(n.args) != 1 or n.kwargs for n in nodes):
            continue
        chains = [_chain(node, modules) for node in nodes]
        if len({(c.relu, c.pool) for c in chains}) > 1:
            chains = [_Chain()]  # one layer, used in several ways
        made[module] = Conv(module, chains[0].relu, chains[0].pool)  # pyright: ignore[reportArgumentType]
        for chain in chains:
            for swallowed in reversed(chain.tail):
                before = swallowed.all_input_nodes[0]
                swallowed.replace_all_uses_with(before)
                graph.erase_node(swallowed)
        made[module].flat = all(_flattened(node, modules) for node in nodes)
    return made


_FLATTENS = ("flatten", "view", "reshape")


def _flattened(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return True if everybody who reads this flattens it, with nothing but element-wise layers in between."""

    def ends(user: fx.Node) -> bool:
        if user.op == "call_module":
            module = modules[str(user.target)]
            kind = type(module)
            return kind is nn.Flatten or (kind in (nn.ReLU, nn.Dropout, layers.Drop) and _flattened(user, modules))
        return _name(user) in _FLATTENS or (user.target in _RELU and _flattened(user, modules))

    return bool(node.users) and all(map(ends, node.users))


def _chain(node: fx.Node, modules: dict[str, nn.Module]) -> _Chain:
    chain = _Chain()
    while len(node.users) == 1:
        (after,) = node.users
        kind = kind_of(after, modules)
        # An average and a ReLU do not commute; a second ReLU or pool is a layer of its own.
        if kind == "relu" and not chain.relu and chain.pool != "avg":
            chain = _Chain(True, chain.pool, (*chain.tail, after))
        elif kind in ("max", "avg") and chain.pool is None:
            chain = _Chain(chain.relu, kind, (*chain.tail, after))
        else:
            break
        node = after
    # ReLU remembers its result for the gradient, a pool does not: what is written into must stay as it was.
    return _Chain() if any(_writes(user, modules) for user in node.users) else chain


def _writes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    return _name(node).endswith("_") or bool(node.kwargs.get("inplace") or node.kwargs.get("out"))


_RELU = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
_POOLS: dict[Literal["max", "avg"], tuple[Any, Any]] = {
    "max": (nn.MaxPool2d, (F.max_pool2d, torch.max_pool2d)),
    "avg": (nn.AvgPool2d, (F.avg_pool2d,)),
}
# Further arguments of a pool, by place and by name; with the values below it is the one that can be fused.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "max": ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
}
_ALLOWED: dict[str, Callable[[Any], bool]] = {
    "kernel_size": lambda v: _both(v, 2),
    "stride": lambda v: v is None or v == [] or _both(v, 2),
    "padding": lambda v: _both(v, 0),
    "dilation": lambda v: _both(v, 1),
    "ceil_mode": lambda v: v is False,
    "return_indices": lambda v: v is False,
    "count_include_pad": lambda v: isinstance(v, bool),
    "divisor_override": lambda v: v is None,
}


def _both(value: Any, wanted: int) -> bool:
    return value == wanted or (isinstance(value, Iterable) and tuple(value) in ((wanted,), (wanted, wanted)))


def kind_of(node: fx.Node, modules: dict[str, nn.Module]) -> Literal["relu", "max", "avg"] | None:
    """Return what a node does to its one input."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if hooked(module) or len(node.args) != 1 or node.kwargs:
            return None
        if type(module) is nn.ReLU:
            return "relu"
        for kind, (layer, _) in _POOLS.items():
            if type(module) is layer:
                given = {name: getattr(module, name) for name in _ARGUMENTS[kind]}
                return kind if all(_ALLOWED[name](value) for name, value in given.items()) else None
        return None
    if len(node.all_input_nodes) != 1 or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target in _RELU:
        return "relu"
    for kind, (_, functions) in _POOLS.items():
        if node.target in functions and len(node.args) - 1 <= len(_ARGUMENTS[kind]):
            given = dict(zip(_ARGUMENTS[kind], node.args[1:], strict=False)) | node.kwargs
            return kind if all(n in _ALLOWED and _ALLOWED[n](v) for n, v in given.items()) else None
    return None
