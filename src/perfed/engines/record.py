"""The operations of a function, recorded once (make_fx), and what they are for any number of rows.

Of each value it keeps what it was like: shape, strides and type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def record(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> fx.Graph:
    """The operations of a function."""
    # Without writing in place, what a value is does not depend on when it is read: the order is then free.
    whole = make_fx(torch.func.functionalize(function, remove="mutations"))
    # One mode to describe all values in: left to itself, make_fx makes one for each, which takes longer than the rest.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        graph = whole(*args).graph
    _free_of_likes(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["val"] = Kind(tuple(value.shape), value.stride(), value.dtype)
    return graph


_LIKES = {torch.ops.aten.ones_like.default: 1.0, torch.ops.aten.zeros_like.default: 0.0}
_FEW = 1 << 16  # numbers that are rather kept than made again


def _free_of_likes(graph: fx.Graph) -> None:
    """Numbers "like" a value need only its shape: a gradient begins with ones like the loss, which nobody reads."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target not in _LIKES or not isinstance(value, Tensor):
            continue
        if value.is_contiguous() and value.is_floating_point() and value.numel() <= _FEW:
            with graph.inserting_before(node):
                kind = {"dtype": value.dtype, "device": value.device}
                new = graph.call_function(torch.ops.aten.full.default, (list(value.shape), _LIKES[node.target]), kind)
            new.meta["val"] = value
            node.replace_all_uses_with(new)
            graph.erase_node(node)


class Kind(NamedTuple):
    """What a traced value was like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Rows:
    """One step for any number of rows, from two recordings: sizes in it are a + b * rows, and two points tell a and b.

    Recording takes long, and a step is needed for every number of clients that are still active.
    """

    def __init__(self, first: tuple[int, fx.Graph], second: tuple[int, fx.Graph]):
        self.first, self.second = first, second
        self.alike = _same_form(first[1], second[1])

    def __call__(self, rows: int) -> fx.Graph | None:
        """The operations for so many rows; None where the two recordings differ in more than sizes."""
        if not self.alike:
            return None
        (one, before), (two, _) = self.first, self.second
        graph, copied = fx.Graph(before.owning_module), {}

        def size(v: int, w: int) -> int:
            slope, rest = divmod(v - w, one - two)
            if rest:
                raise _NotLinear
            return v + slope * (rows - one)

        def between(v: Any, w: Any) -> Any:
            if isinstance(v, fx.Node):
                return copied[v]
            if isinstance(v, int) and not isinstance(v, bool):
                return size(v, w)
            if isinstance(v, tuple | list) and not isinstance(v, torch.Size | Kind):
                return type(v)(between(x, y) for x, y in zip(v, w, strict=True))
            return v

        try:
            for v, w in zip(before.nodes, self.second[1].nodes, strict=True):
                new = graph.create_node(
                    v.op, v.target, between(tuple(v.args), tuple(w.args)),
                    {k: between(x, w.kwargs[k]) for k, x in v.kwargs.items()}, v.name,
                )  # fmt: skip
                kind, other = v.meta.get("val"), w.meta.get("val")
                if isinstance(kind, Kind):
                    shape = tuple(map(size, kind.shape, other.shape))
                    new.meta["val"] = Kind(shape, tuple(map(size, kind.stride, other.stride)), kind.dtype)
                copied[v] = new
        except _NotLinear:
            return None
        return graph


class _NotLinear(Exception):
    pass


def _same_form(one: fx.Graph, two: fx.Graph) -> bool:
    """Whether two recordings are the same operations on the same values, whatever their sizes."""

    def form(v: Any, place: dict[fx.Node, int]) -> Any:
        if isinstance(v, fx.Node):
            return ("node", place[v])
        if isinstance(v, tuple | list):
            return [form(x, place) for x in v]
        if isinstance(v, dict):
            return {k: form(x, place) for k, x in v.items()}
        return "size" if isinstance(v, int) and not isinstance(v, bool) else str(v)

    constants = [[held(g, n) for n in g.nodes if n.op == "get_attr"] for g in (one, two)]
    same = lambda a, b: a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if len(constants[0]) != len(constants[1]) or not all(map(same, *constants)):
        return False
    forms = []
    for graph in (one, two):
        place = {node: at for at, node in enumerate(graph.nodes)}
        forms.append([(n.op, str(n.target), form([n.args, n.kwargs], place)) for n in graph.nodes])
    return forms[0] == forms[1]


def kind_of(node: Any) -> Any:
    """What a node's value was like; None for what is no node."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's value."""
    return tuple(kind_of(node).shape)


def held(graph: fx.Graph, node: fx.Node) -> Any:
    """The constant that a recording holds."""
    return functools.reduce(getattr, str(node.target).split("."), graph.owning_module)
