"""Recording the operations of a function once, and rewriting them for any number of rows.

Of each value the shape, strides and type are kept. PyTorch's own `make_fx` records the same and more, and takes five
times as long.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_LIKES = {torch.ops.aten.ones_like.default: 1.0, torch.ops.aten.zeros_like.default: 0.0}
_FEW = 1 << 16  # numbers that are better kept than made again


def record(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> fx.Graph:
    """Return the operations of a function, which are run on these arguments."""
    recorder = _Recorder()
    given = [a.view_as(a) for a in args]  # one tensor may be given twice, and is two arguments
    for place, tensor in enumerate(given):
        recorder.name(tensor, recorder.graph.placeholder(f"arg{place}_1"))
    # Where nothing is written in place, a value does not depend on when it is read, and the order is free.
    with recorder:
        results = torch.func.functionalize(function, remove="mutations")(*given)
    recorder.graph.output([recorder.node(r) for r in results])
    _shut_out(recorder.graph)
    recorder.graph.eliminate_dead_code()
    return recorder.graph


def _shut_out(graph: fx.Graph) -> None:
    """Replace the parts of a gradient that a constant mask shuts out by zeros: what computes them is then dead code.

    A step that moves only the head, as in FedRep and FedRoD, goes back no further than the head.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        mask, joined, other = node.args
        if mask.op != "get_attr" or joined.target is not aten.cat.default:
            continue
        if joined is other or len(joined.users) > 1:  # its numbers are read without the mask, too
            continue
        shape, dtype = shape_of(joined), kind_of(joined).dtype
        through = constant_of(graph, mask)
        if len(shape) != 2 or joined.args[1:] not in ((1,), (-1,)) or through.shape != shape[1:] or not through.any():
            continue
        pieces, end = list(joined.args[0]), 0
        for place, piece in enumerate(pieces):
            begin, end = end, end + shape_of(piece)[-1]
            if end > begin and not through[begin:end].any():
                with graph.inserting_before(joined):
                    zero = graph.call_function(aten.zeros.default, ([1],), {"dtype": dtype, "device": through.device})
                    pieces[place] = graph.call_function(aten.expand.default, (zero, [shape[0], end - begin]))
                zero.meta["val"] = Kind((1,), (1,), dtype)
                pieces[place].meta["val"] = Kind((shape[0], end - begin), (0, 0), dtype)
        joined.update_arg(0, pieces)


class _Recorder(TorchDispatchMode):
    """Write down every operation that reaches the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.constants = nn.Module()
        self.graph = fx.Graph(self.constants)  # pyright: ignore[reportArgumentType]
        self.nodes = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # telling the compiler to stay away would import it

    def name(self, value: Tensor, node: fx.Node) -> None:
        """Let this value be that of a node from here on."""
        node.meta["val"] = Kind(tuple(value.shape), value.stride(), value.dtype)
        self.nodes[value] = node

    def node(self, value: Tensor) -> fx.Node:
        """Return the node that has this value; what comes from elsewhere is a constant."""
        if value not in self.nodes:
            place = f"constant{len(self.constants._buffers)}"
            self.constants.register_buffer(place, value)
            self.name(value, self.graph.get_attr(place))
            self.nodes[value].meta["constant"] = True
        return self.nodes[value]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read: Any = tree_map_only(Tensor, self.node, (args, kwargs))
        sources = [n for n in tree_leaves(read) if isinstance(n, fx.Node)]
        out = func(*args, **kwargs)
        if func._schema.is_mutable:  # what it wrote over has from here on the value of an operation that does not write
            func, out = self._without_writing(func, args, sources), args[0]
        constant = all(n.meta.get("constant") for n in sources)
        if not all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            if constant:  # known for good
                return out
            raise RuntimeError(f"a step that is recorded cannot look at the numbers of a tensor ({func})")
        if func in _LIKES and _light(out):
            # It needs only the shape: a gradient begins with ones like the loss, which nobody reads.
            func, read, constant = torch.ops.aten.full.default, ((list(out.shape), _LIKES[func]), _kind(out)), False
        node = self.graph.create_node("call_function", func, *read, name=func._schema.name.split("::")[-1])
        if isinstance(out, Tensor):
            self.name(out, node)
            node.meta["constant"] = constant and bool(sources)
        else:
            for place, leaf in enumerate(out or ()):
                if leaf is not None:
                    self.name(leaf, self.graph.call_function(operator.getitem, (node, place)))
        return out

    def _without_writing(self, func: Any, args: Any, sources: list[fx.Node]) -> Any:
        """Return the operation that gives its result in new memory; refuse where others look at the memory written.

        `functionalize` has done so for all others: it does not see what runs below vmap's own rules.
        """
        target, name = args[0] if args else None, func._schema.name.split("::")[-1]
        other = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), func._overloadname, None)
        if isinstance(target, Tensor) and name.endswith("_") and other is not None and sources[0].op == "call_function":
            memory = target.untyped_storage().data_ptr()
            others = [*(t for t in self.nodes if t is not target), *self.constants.buffers()]
            if all(t.untyped_storage().data_ptr() != memory for t in others):
                return other
        raise RuntimeError(f"a step that is recorded cannot write over a tensor ({func})")


def _light(value: Tensor) -> bool:
    return value.is_contiguous() and value.is_floating_point() and value.numel() <= _FEW


def _kind(value: Tensor) -> dict[str, Any]:
    return {"dtype": value.dtype, "device": value.device}


class Kind(NamedTuple):
    """Describe a recorded value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Rows:
    """Make a step for any number of rows from two recordings: sizes are a + b * rows, and two points tell a and b.

    Recording takes long, and a step is needed for every number of clients that are still active.
    """

    def __init__(self, first: tuple[int, fx.Graph], second: tuple[int, fx.Graph]):
        self.first, self.second = first, second
        self.alike = _same_form(first[1], second[1])

    def __call__(self, rows: int) -> fx.Graph | None:
        """Return the operations for so many rows; None where the two recordings differ in more than sizes."""
        if not self.alike:
            return None
        (rows_before, before), (rows_after, _) = self.first, self.second
        graph, copied = fx.Graph(before.owning_module), {}

        def size(v: int, w: int) -> int:
            slope, rest = divmod(v - w, rows_before - rows_after)
            if rest:
                raise _NotLinear
            return v + slope * (rows - rows_before)

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


def _same_form(first: fx.Graph, second: fx.Graph) -> bool:
    """Return True if two recordings are the same operations on the same values, whatever their sizes."""

    def form(v: Any, place: dict[fx.Node, int]) -> Any:
        if isinstance(v, fx.Node):
            return ("node", place[v])
        if isinstance(v, tuple | list):
            return [form(x, place) for x in v]
        if isinstance(v, dict):
            return {k: form(x, place) for k, x in v.items()}
        return "size" if isinstance(v, int) and not isinstance(v, bool) else str(v)

    constants = [[constant_of(g, n) for n in g.nodes if n.op == "get_attr"] for g in (first, second)]
    same = lambda a, b: a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if len(constants[0]) != len(constants[1]) or not all(map(same, *constants)):
        return False
    forms = []
    for graph in (first, second):
        place = {node: number for number, node in enumerate(graph.nodes)}
        forms.append([(n.op, str(n.target), form([n.args, n.kwargs], place)) for n in graph.nodes])
    return forms[0] == forms[1]


def kind_of(node: Any) -> Any:
    """Return what a node's value was like; None for what is no node."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's value."""
    return tuple(kind_of(node).shape)


def constant_of(graph: fx.Graph, node: fx.Node) -> Any:
    """Return the value of a node that is a constant of a recording."""
    return functools.reduce(getattr, str(node.target).split("."), graph.owning_module)
