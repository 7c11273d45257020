"""A batched step as a short program: arithmetic on the same numbers is one kernel.

A method writes theta - lr * (g + lam * (theta - w)); run as it stands, each sign is a pass over all clients' models
through the GPU's memory, and those passes cost more than the network. `trace` records the step's operations once
(make_fx), joins runs of element-wise operations into one generated Triton kernel each, takes row sums along, and lets
the kernel read a gradient from its pieces instead of joining them first, or work out the largest of them, the matrix
products, where it needs them. Where an output may overwrite the input it came from, it does. All other operations run
as they are.
"""

# Kernels are called through brackets with plain numbers, and arguments of a traced node can be anything.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOptionalIterable=false

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from perfed.core.capture import queue

aten = torch.ops.aten

# Operation -> the same in Triton; {0}, {1}, ... are its arguments.
_WORDS: dict[Any, str] = {
    aten.add.Tensor: "{0} + {1}", aten.sub.Tensor: "{0} - {1}", aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}", aten.add.Scalar: "{0} + {1}", aten.sub.Scalar: "{0} - {1}",
    aten.mul.Scalar: "{0} * {1}", aten.div.Scalar: "{0} / {1}", aten.rsub.Scalar: "{1} - {0}",
    aten.neg.default: "-{0}", aten.relu.default: "tl.where({0} <= 0, 0.0, {0})", aten.abs.default: "tl.abs({0})",
    aten.exp.default: "tl.exp({0})", aten.log.default: "tl.log({0})", aten.sqrt.default: "tl.sqrt({0})",
    aten.rsqrt.default: "1.0 / tl.sqrt({0})", aten.reciprocal.default: "1.0 / {0}",
    aten.sigmoid.default: "tl.sigmoid({0})", aten.detach.default: "{0}",
    aten.maximum.default: "tl.maximum({0}, {1}, _NAN)",
    aten.minimum.default: "tl.minimum({0}, {1}, _NAN)", aten.clamp_min.default: "tl.where({0} < {1}, {1}, {0})",
    aten.clamp_max.default: "tl.where({0} > {1}, {1}, {0})", aten.where.self: "tl.where({0}, {1}, {2})",
    aten.threshold_backward.default: "tl.where({1} <= {2}, 0.0, {0})", aten.gt.Scalar: "{0} > {1}",
    aten.gt.Tensor: "{0} > {1}", aten.lt.Scalar: "{0} < {1}", aten.lt.Tensor: "{0} < {1}",
    aten.ge.Scalar: "{0} >= {1}", aten.ge.Tensor: "{0} >= {1}", aten.le.Scalar: "{0} <= {1}",
    aten.le.Tensor: "{0} <= {1}",
}  # fmt: skip
_FILLED = {aten.zeros_like.default: "0.0", aten.ones_like.default: "1.0"}
_WITH_ALPHA = {aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar}
_LARGE = 4096  # row sums of at least this many numbers are taken along
_BLOCK = 512
_TILE = (32, 128)  # of a matrix product
_DEPTH = 128  # terms of a product that is worked out where it is needed; a longer one is left to the library


def trace(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> Program:
    """The function as a program for arguments of these shapes."""
    return Program(record(function, *args))


def record(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> fx.Graph:
    """The operations of a function."""
    # Without writing in place, what a value is does not depend on when it is read: the order is then free.
    graph = make_fx(torch.func.functionalize(function, remove="mutations"))(*args).graph
    graph.eliminate_dead_code()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["val"] = Kind(tuple(value.shape), value.stride(), value.dtype)
    return graph


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

    constants = [[_held(g, n) for n in g.nodes if n.op == "get_attr"] for g in (one, two)]
    same = lambda a, b: a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if len(constants[0]) != len(constants[1]) or not all(map(same, *constants)):
        return False
    forms = []
    for graph in (one, two):
        place = {node: at for at, node in enumerate(graph.nodes)}
        forms.append([(n.op, str(n.target), form([n.args, n.kwargs], place)) for n in graph.nodes])
    return forms[0] == forms[1]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(_value(node).shape)


def _literal(number: Any) -> str:
    if isinstance(number, bool):
        return str(number)
    return f"({float(number)!r})" if math.isfinite(number) else f'float("{number}")'


def _constant(node: Any) -> str | None:
    """The text of a node that is a plain number."""
    if isinstance(node, int | float):
        return _literal(node)
    if isinstance(node, fx.Node) and "number" in node.meta:
        return _literal(node.meta["number"])
    if isinstance(node, fx.Node) and node.target in _FILLED:
        return _FILLED[node.target]
    return None


def _simple(node: fx.Node) -> bool:
    """Whether a node is element-wise arithmetic of one kind of float that the generator knows."""
    value = _value(node)
    if node.op != "call_function" or node.target not in _WORDS or not isinstance(value, Kind):
        return False
    if node.kwargs and not set(node.kwargs) <= {"alpha"}:
        return False
    if node.target in _WITH_ALPHA and len(node.args) > 2:  # by place, where the words do not look
        return False
    kinds = {value.dtype} if value.dtype != torch.bool else set()
    if all(_constant(arg) is not None for arg in node.args):
        return False
    for at, arg in enumerate(node.args):
        if _constant(arg) is not None:
            continue
        if not isinstance(arg, fx.Node) or not isinstance(_value(arg), Kind):
            return False
        if _value(arg).dtype != torch.bool:
            kinds.add(_value(arg).dtype)
        elif node.target is not aten.mul.Tensor and (node.target is not aten.where.self or at != 0):
            return False
    return len(kinds) == 1 and kinds <= {torch.float32, torch.float64} and len(value.shape) > 0


def _row_sum(node: fx.Node) -> bool:
    """Whether a node sums long rows, so that a kernel which makes them can sum them too."""
    if node.target is not aten.sum.dim_IntList or not isinstance(node.args[0], fx.Node):
        return False
    shape, kind = _shape(node.args[0]), node.kwargs.get("dtype")
    if not _value(node.args[0]).dtype.is_floating_point or _value(node.args[0]).stride[-1] != 1:
        return False
    return len(shape) == 2 and list(node.args[1]) in ([1], [-1]) and shape[1] >= _LARGE and kind in (
        None, torch.float32, torch.float64,
    )  # fmt: skip


@dataclass(eq=False)
class Cluster:
    """Element-wise operations on one shape, done in one kernel."""

    nodes: list[fx.Node]
    shape: tuple[int, ...]
    sums: list[fx.Node] = field(default_factory=list)
    joined: fx.Node | None = None  # a concatenation read piece by piece
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    products: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pieces that are batched matrix products

    @property
    def pieces(self) -> list[fx.Node]:
        """What is joined; an empty piece may have another number of dimensions, and is none."""
        return [] if self.joined is None else [p for p in self.joined.args[0] if len(_shape(p)) == 2]


class Program:
    """Operations in order, some of them joined."""

    def __init__(self, graph: fx.Graph):
        self.holders = [n for n in graph.nodes if n.op == "placeholder"]
        end = next(n for n in graph.nodes if n.op == "output")
        self.results: list[Any] = list(end.args[0])
        self.fixed = _fixed(graph)
        todo = [n for n in graph.nodes if n.op == "call_function" and n not in self.fixed]
        self.items = _schedule(todo, set(self.results))
        for item in self.items:
            if isinstance(item, Cluster):
                self._take_products(item)
        self.last_use = self._last_uses()
        self.safe = self._overwritable()
        self.ahead = self._ahead()

    def _take_products(self, cluster: Cluster) -> None:
        """Let the kernel work out large matrix products: a gradient that only moves theta is never written."""
        for piece in cluster.pieces:
            chain = [piece]
            while _is_view(chain[-1]) and len(chain[-1].users) == 1 and chain[-1].all_input_nodes:
                chain.append(chain[-1].all_input_nodes[0])
            product = chain[-1]
            kind, made = _value(piece), _value(product)
            if product.target is not aten.bmm.default or len(product.users) != 1 or not isinstance(kind, Kind):
                continue
            # Views that end in rows without gaps, of a product without gaps: the same numbers in the same order.
            (_, m, n), depth = made.shape, _shape(product.args[0])[2]
            plain = kind.stride == (kind.shape[1], 1) and made.stride == (m * n, n, 1)
            if plain and kind.dtype == torch.float32 and 0 < depth <= _DEPTH and _large(piece, cluster):
                cluster.products[piece] = product
                self.items = [item for item in self.items if item not in chain]

    def _reads(self, item: fx.Node | Cluster) -> list[fx.Node]:
        if isinstance(item, fx.Node):
            return list(item.all_input_nodes)
        pieces = item.pieces
        apart = [n for product in item.products.values() for n in product.all_input_nodes]
        return [*item.inputs, *(p for p in pieces if p not in item.products), *apart]

    def _last_uses(self) -> list[list[fx.Node]]:
        """After each item: what nobody will read again."""
        last: dict[fx.Node, int] = {}
        for at, item in enumerate(self.items):
            for node in self._reads(item):
                last[node] = at
        kept = set(self.results) | set(self.holders)
        out: list[list[fx.Node]] = [[] for _ in self.items]
        for node, at in last.items():
            if node not in kept:
                out[at].append(node)
        return out

    def _roots(self) -> dict[fx.Node, fx.Node]:
        """What each view is a view of."""
        root: dict[fx.Node, fx.Node] = {}
        for item in self.items:
            if isinstance(item, fx.Node) and item.all_input_nodes and _is_view(item):
                source = item.all_input_nodes[0]
                root[item] = root.get(source, source)
        return root

    def _overwritable(self) -> dict[fx.Node, int]:
        """Results of a kernel after which nobody looks at argument k any more (not through a view either)."""
        root, last = self._roots(), {}
        for at, item in enumerate(self.items):
            for node in self._reads(item):
                last[root.get(node, node)] = at
        old = lambda k, r: root.get(r, r) in self.holders and r is not self.holders[k]
        self.borrowed = {k for k, r in enumerate(self.results) if k >= len(self.holders) or old(k, r)}
        safe: dict[fx.Node, int] = {}
        for at, item in enumerate(self.items):
            if isinstance(item, Cluster):
                for node in item.outputs:
                    if node in self.results:
                        k = self.results.index(node)
                        if k >= len(self.holders):
                            continue
                        holder = self.holders[k]
                        # Neither a result nor a view that this kernel reads elsewhere may be the old value.
                        seen = [*self.results, *(r for r in self._reads(item) if r is not holder)]
                        free = all(root.get(r, r) is not holder for r in seen)
                        alike = _shape(holder) == item.shape and _value(holder).dtype == _value(node).dtype
                        if free and last.get(holder, -1) <= at and alike:
                            safe[node] = k
        return safe

    def _ahead(self) -> dict[int, list[Cluster]]:
        """Before which item the products of a cluster may already be added, beside everything that follows.

        Moving all clients' numbers waits for the memory, the gradients of the layers before for the arithmetic: a GPU
        does both at once. Everything is there by then, and what is overwritten is read by nobody else any more.
        """
        root = self._roots()
        made = {n: at for at, item in enumerate(self.items) for n in _makes(item)}
        found: dict[int, list[Cluster]] = {}
        for at, item in enumerate(self.items):
            if not isinstance(item, Cluster) or not item.products or item.sums:
                continue
            if not all(n in self.safe for n in item.outputs):
                continue
            factors = [n for product in item.products.values() for n in product.all_input_nodes]
            first = 1 + max(made.get(n, -1) for n in [*item.inputs, *factors])
            over = {self.holders[self.safe[n]] for n in item.outputs}
            for earlier, other in enumerate(self.items[:at]):
                if any(root.get(n, n) in over for n in self._reads(other)):
                    first = max(first, earlier + 1)
            if first < at:
                found.setdefault(first, []).append(item)
        return found

    def __call__(self, *args: Tensor, into: Sequence[Tensor] = ()) -> list[Tensor]:
        """The results; result k is written into `into[k]`, which may be argument k itself, where one is given."""
        env: dict[Any, Any] = dict(zip(self.holders, args, strict=True)) | self.fixed
        beside = _Beside()
        for at, (item, done) in enumerate(zip(self.items, self.last_use, strict=True)):
            for cluster in self.ahead.get(at, ()):
                place = self._place(cluster, into)
                if len(place) == len(cluster.outputs):
                    beside.begun.add(cluster)
                    with beside(into[0]):
                        _launch(cluster, env, place, "products")
            if isinstance(item, Cluster):
                begun = item in beside.begun
                if begun:
                    beside.join()
                _launch(item, env, self._place(item, into), "rest" if begun else "all")
            else:
                get = lambda n: env[n]
                env[item] = item.target(*map_arg(item.args, get), **map_arg(item.kwargs, get))
            for node in done:
                env.pop(node, None)
        out = [env[r] for r in self.results]
        # A result that is an argument, or looks at one, is taken before that argument is overwritten.
        out = [t.clone() if k in self.borrowed and into else t for k, t in enumerate(out)]
        for k, target in enumerate(into):
            if out[k] is not target:
                target.copy_(out[k])
        return [*into, *out[len(into) :]]

    def _place(self, cluster: Cluster, into: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
        return {n: into[k] for n, k in self.safe.items() if k < len(into) and n in cluster.outputs}


def _makes(item: fx.Node | Cluster) -> list[fx.Node]:
    return [item] if isinstance(item, fx.Node) else [*item.outputs, *item.sums]


class _Beside:
    """A second queue of a GPU, for what nobody waits for; elsewhere the same one after another."""

    def __init__(self) -> None:
        self.begun: set[Cluster] = set()
        self.queue: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def __call__(self, some: Tensor) -> Iterator[None]:
        if not some.is_cuda:
            yield
            return
        self.queue = queue(some.device, 0)
        self.queue.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.queue):
            yield

    def join(self) -> None:
        if self.queue is not None:
            torch.cuda.current_stream().wait_stream(self.queue)


def _held(graph: fx.Graph, node: fx.Node) -> Any:
    return functools.reduce(getattr, str(node.target).split("."), graph.owning_module)


def _fixed(graph: fx.Graph) -> dict[fx.Node, Any]:
    """What depends on no argument, worked out once; a single number is noted at its node, for kernels to hold."""
    fixed: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            fixed[node] = _held(graph, node)
        elif node.op == "call_function" and all(n in fixed for n in node.all_input_nodes) and not _random(node):
            fixed[node] = node.target(*map_arg(node.args, fixed.get), **map_arg(node.kwargs, fixed.get))
        if isinstance(fixed.get(node), Tensor) and fixed[node].dim() == 0:
            node.meta["number"] = fixed[node].item()
    return fixed


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_view(node: fx.Node) -> bool:
    if node.target in (operator.getitem, aten._unsafe_view.default):  # the latter is one, and does not say so
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


# ---------------------------------------------------------------------------------------------------- joining


def _schedule(nodes: list[fx.Node], results: set[Any]) -> list[fx.Node | Cluster]:
    """Nodes and clusters in an order in which everything is made before it is read."""
    group: dict[fx.Node, int] = {}  # node -> number of its group; groups of one are ordinary nodes
    members: dict[int, list[fx.Node]] = {}
    for number, node in enumerate(nodes):
        group[node], members[number] = number, [node]

    def after(number: int) -> set[int]:
        return {group[user] for n in members[number] for user in n.users if user in group} - {number}

    def would_cycle(parts: set[int]) -> bool:
        """Whether a path leaves these groups and comes back."""
        seen: set[int] = set()
        todo = [s for p in parts for s in after(p) if s not in parts]
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            for following in after(at):
                if following in parts:
                    return True
                todo.append(following)
        return False

    def join(parts: set[int]) -> None:
        keep, *rest = sorted(parts)
        for other in rest:
            for node in members.pop(other):
                group[node] = keep
                members[keep].append(node)

    simple = [n for n in nodes if _simple(n)]
    for node in simple:
        for source in node.all_input_nodes:
            if source in group and _simple(source) and _shape(source) == _shape(node):
                parts = {group[node], group[source]}
                if len(parts) == 2 and not would_cycle(parts):
                    join(parts)
    for node in nodes:  # row sums go with the kernel that makes the rows
        if _row_sum(node) and node.args[0] in group and _simple(node.args[0]):
            parts = {group[node], group[node.args[0]]}
            if len(parts) == 2 and not would_cycle(parts):
                join(parts)
    position = {node: at for at, node in enumerate(nodes)}
    clusters: dict[int, Cluster] = {}
    for number, inside in members.items():
        inside.sort(key=position.__getitem__)
        if len(inside) > 1 or _worth_it(inside[0], results):
            made = [n for n in inside if not _row_sum(n)]
            clusters[number] = Cluster(made, _shape(made[0]), [n for n in inside if _row_sum(n)])
    for number, cluster in clusters.items():
        _finish(cluster, members[number], results)
    absorbed = {c.joined for c in clusters.values() if c.joined is not None}
    order = _sorted(members, after)
    return [clusters[k] if k in clusters else members[k][0] for k in order if members[k][0] not in absorbed]


def _worth_it(node: fx.Node, results: set[Any]) -> bool:
    """Whether one operation alone is better as a kernel: it can overwrite its argument, or read pieces."""
    return _simple(node) and (node in results or any(n.target is aten.cat.default for n in node.all_input_nodes))


def _finish(cluster: Cluster, inside: list[fx.Node], results: set[Any]) -> None:
    seen = dict.fromkeys(
        a for n in cluster.nodes for a in n.args if isinstance(a, fx.Node) and a not in inside and _constant(a) is None
    )
    for node in seen:
        whole = _shape(node) == cluster.shape and len(cluster.shape) == 2
        if node.target is aten.cat.default and whole and node not in results and cluster.joined is None:
            dim = node.args[1] if len(node.args) > 1 else 0
            if dim in (1, -1) and all(user in inside for user in node.users):
                cluster.joined = node
    cluster.inputs = [n for n in seen if n is not cluster.joined]
    out = [n for n in cluster.nodes if n in results or any(u not in inside for u in n.users)]
    cluster.outputs = out


def _sorted(members: dict[int, list[fx.Node]], after: Callable[[int], set[int]]) -> list[int]:
    waits = dict.fromkeys(members, 0)
    following = {k: after(k) for k in members}
    for k in members:
        for f in following[k]:
            waits[f] += 1
    ready, order = sorted((k for k, w in waits.items() if w == 0), reverse=True), []
    while ready:
        k = ready.pop()
        order.append(k)
        for f in sorted(following[k], reverse=True):
            waits[f] -= 1
            if waits[f] == 0:
                ready.append(f)
    return order


# ---------------------------------------------------------------------------------------------------- kernels


def _launch(cluster: Cluster, env: dict[Any, Any], place: dict[fx.Node, Tensor], part: str = "all") -> None:
    """Run a cluster, or only its products or the rest: outputs go to `place` where it names one, else to new memory."""
    some = env[cluster.inputs[0]] if cluster.inputs else env[cluster.pieces[0]]
    width = cluster.shape
    out = {n: place[n] if n in place else _room(_value(n), some.device) for n in cluster.outputs}
    into = {n: t.view(torch.int8) if t.dtype == torch.bool else t for n, t in out.items()}
    given = {n: env[n].view(torch.int8) if env[n].dtype == torch.bool else env[n] for n in cluster.inputs}
    given = {n: t.expand(width) for n, t in given.items()}
    if cluster.joined is None and not cluster.sums:
        _run_flat(cluster, given, into)
    else:
        _run_rows(cluster, given, into, env, some.device, part)
    if part != "products":
        env.update(out)


def _room(like: Kind, device: torch.device) -> Tensor:
    """Memory that lies as it did when the step was traced: what follows may look at it through a view."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)


class _Segment(NamedTuple):
    """Columns of a row that one launch works on."""

    begin: int
    end: int
    piece: Tensor | None = None  # the part of the concatenation that lies here
    product: tuple[Tensor, Tensor] | None = None  # or the factors whose product it is

    @property
    def blocks(self) -> int:
        if self.product is None:
            return -(-(self.end - self.begin) // _BLOCK)
        a, b = self.product
        return -(-a.shape[1] // _TILE[0]) * -(-b.shape[2] // _TILE[1])


def _run_rows(cluster: Cluster, given: dict, into: dict, env: dict[Any, Any], device: torch.device, part: str) -> None:
    """Rows one by one, in segments where an input is a concatenation."""
    rows, length = cluster.shape
    segments = [_Segment(0, length)] if cluster.joined is None else _segments(cluster, env, part)
    blocks = sum(s.blocks for s in segments)
    sums = {n: torch.empty(rows, blocks, dtype=_sum_kind(n), device=device) for n in cluster.sums}
    first = 0
    for begin, end, piece, product in segments:
        tensors = {n: _side_by_side(t[:, begin:end]) for n, t in given.items()}
        if piece is not None:
            tensors[cluster.joined] = _side_by_side(piece)
        targets = {n: t[:, begin:end] for n, t in into.items()}
        places, numbers = [], []
        for t in [*tensors.values(), *targets.values()]:
            how, stride = _row_place(t)
            places.append(how)
            numbers.append(stride)
        kernel = _kernel(
            cluster, tuple(tensors), tuple(targets), tuple(places), "rows" if product is None else "product"
        )
        pointers = [*tensors.values(), *targets.values(), *sums.values()]
        count = _Segment(begin, end, piece, product).blocks
        if product is None:
            kernel[(count, rows)](*pointers, *numbers, blocks, first, end - begin, BLOCK=_BLOCK)
        else:
            a, b = product
            sizes = (a.shape[1], b.shape[2], a.shape[2], *a.stride(), *b.stride())
            exact = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
            kernel[(count, rows)](*pointers, *numbers, blocks, first, a, b, *sizes, *_TILE, 16, exact)
        first += count
    for n, parts in sums.items():
        total = parts.sum(1)
        env[n] = total[:, None] if len(n.args) > 2 and n.args[2] else total


def _sum_kind(node: fx.Node) -> torch.dtype:
    return node.kwargs.get("dtype") or _value(node.args[0]).dtype  # pyright: ignore


def _large(piece: fx.Node, cluster: Cluster) -> bool:
    return _shape(piece)[1] * 8 > cluster.shape[1]


def _segments(cluster: Cluster, env: dict[Any, Any], part: str) -> list[_Segment]:
    """Large pieces stand alone, neighbours that are small are joined after all."""
    out: list[_Segment] = []
    waiting: list[Tensor] = []
    at = 0

    def flush(end: int) -> None:
        if waiting:
            whole = waiting[0] if len(waiting) == 1 else torch.cat(waiting, 1)
            out.append(_Segment(end - whole.shape[1], end, whole))
            waiting.clear()

    for node in cluster.pieces:
        size = _shape(node)[1]
        if _large(node, cluster):
            flush(at)
            if node in cluster.products and part != "rest":
                a, b = (env[n] for n in cluster.products[node].args)
                out.append(_Segment(at, at + size, product=(a, b)))
            elif node not in cluster.products and part != "products":
                out.append(_Segment(at, at + size, env[node]))
        elif part != "products":
            waiting.append(env[node])
        at += size
    flush(at)
    return out


def _row_place(t: Tensor) -> tuple[str, int]:
    """How a kernel finds (row, column) of a tensor, and the number it needs for it."""
    row, column = t.stride()
    if t.shape[1] == 1:
        column = 0
    if column == 0:
        return ("0", 0) if row == 0 else ("row * {s}", row)
    if column == 1:
        # Said as a multiple of four, so that the compiler knows that 16 bytes may be read at once.
        return ("row * (4 * {s}) + col", row // 4) if row % 4 == 0 else ("row * {s} + col", row)
    raise ValueError("the numbers of a row must lie side by side")


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.stride(1) in (0, 1) or t.shape[1] == 1 else t.contiguous()


def _run_flat(cluster: Cluster, given: dict, into: dict) -> None:
    """Any shape: dimensions that lie alike in all tensors are merged first."""
    tensors = [*given.values(), *into.values()]
    sizes, strides = _merge(cluster.shape, [t.stride() for t in tensors])
    places = []
    numbers: list[int] = list(sizes[1:])
    for stride in strides:
        terms = []
        for d, s in enumerate(stride):
            if s == 1:
                terms.append(f"i{d}")
            elif s != 0:
                terms.append(f"i{d} * {{s{len(numbers)}}}")
                numbers.append(s)
        places.append(" + ".join(terms) or "0")
    kernel = _kernel(cluster, tuple(given), tuple(into), tuple(places), "flat", dims=len(sizes))
    total = functools.reduce(operator.mul, sizes, 1)
    kernel[(triton.cdiv(total, _BLOCK),)](*tensors, *numbers, total, BLOCK=_BLOCK)


def _merge(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """The fewest dimensions that describe all tensors."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d in sorted(range(len(shape)), key=lambda d: -strides[-1][d]):  # as they lie in the last tensor, an output
        size = shape[d]
        if size == 1:
            continue
        if sizes and all(k[-1] == s[d] * size for k, s in zip(kept, strides, strict=True)):
            sizes[-1] *= size
            for k, s in zip(kept, strides, strict=True):
                k[-1] = s[d]
        else:
            sizes.append(size)
            for k, s in zip(kept, strides, strict=True):
                k.append(s[d])
    return (sizes, kept) if sizes else ([1], [[1] for _ in strides])


_kernels: dict[str, Any] = {}


_ROWS_NAMES = ["N", "BLOCK: tl.constexpr"]
_ROWS = """\
row = tl.program_id(1).to(tl.int64)
col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
ok = col < N"""

_PRODUCT_NAMES = ["a", "b", "m", "n", "depth", "a0", "a1", "a2", "b0", "b1", "b2"]
_PRODUCT_NAMES += [f"{word}: tl.constexpr" for word in ("BM", "BN", "BK", "PREC")]
_PRODUCT = """\
row = tl.program_id(1).to(tl.int64)
across = tl.cdiv(n, BN)
i = tl.program_id(0) // across * BM + tl.arange(0, BM)
j = tl.program_id(0) % across * BN + tl.arange(0, BN)
g = tl.zeros((BM, BN), tl.float32)
for k0 in range(0, depth, BK):
    k = k0 + tl.arange(0, BK)
    left, right = row * a0 + i[:, None] * a1 + k[None, :] * a2, row * b0 + k[:, None] * b1 + j[None, :] * b2
    left = tl.load(a + left, mask=(i < m)[:, None] & (k < depth)[None, :], other=0)
    right = tl.load(b + right, mask=(k < depth)[:, None] & (j < n)[None, :], other=0)
    g = tl.dot(left, right, g, input_precision=PREC)
col = i[:, None] * n + j[None, :]
ok = (i < m)[:, None] & (j < n)[None, :]"""  # fmt: skip


def _kernel(cluster: Cluster, inputs: tuple, outputs: tuple, places: tuple[str, ...], kind: str, dims: int = 0) -> Any:
    """The compiled kernel of a cluster for tensors that lie like this; `kind` is flat, rows or product."""
    tensors = [f"p{k}" for k in range(len(inputs))] + [f"q{k}" for k in range(len(outputs))]
    sums = [f"z{k}" for k in range(len(cluster.sums))]
    if kind == "flat":
        highest = max((int(w.split("}")[0]) for p in places for w in p.split("{s")[1:]), default=dims - 2)
        numbers = [f"s{k}" for k in range(max(highest + 1, dims - 1))]
        places = tuple(p.replace("{", "").replace("}", "") for p in places)
        names = [*tensors, *numbers, "N", "BLOCK: tl.constexpr"]
        lines = ["at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)", "ok = at < N"]
        for d in range(dims - 1, 0, -1):
            lines += [f"i{d} = at % s{d - 1}", f"at = at // s{d - 1}"]
        lines += ["i0 = at"]
    else:
        places = tuple(p.format(s=f"s{k}") for k, p in enumerate(places))
        names = [*tensors, *sums, *(f"s{k}" for k in range(len(tensors))), "Z", "z_first"]
        lines = (_ROWS if kind == "rows" else _PRODUCT).splitlines()
        names += _ROWS_NAMES if kind == "rows" else _PRODUCT_NAMES
    value: dict[fx.Node, str] = {}
    kinds = {torch.float32: "tl.float32", torch.float64: "tl.float64"}
    for k, node in enumerate(inputs):
        truth = " != 0" if _value(node).dtype == torch.bool else ""
        masked = ", mask=ok, other=0" if "col" in places[k] or "i" in places[k] else ""  # else one number for all
        lines.append(f"v{k} = tl.load(p{k} + {places[k]}{masked}){truth}")
        value[node] = f"v{k}"
    if kind == "product":
        value[cluster.joined] = "g"
    for k, node in enumerate(cluster.nodes):
        # Named by its kind: Triton compares with numbers of single precision otherwise.
        tensors = [a for a in node.all_input_nodes if _constant(a) is None]
        double = any(_value(a).dtype == torch.float64 for a in tensors)
        say = (lambda text: f"tl.full((), {text}, tl.float64)") if double else (lambda text: text)
        words = [value[a] if isinstance(a, fx.Node) and a in value else say(_constant(a)) for a in node.args]
        if "alpha" in node.kwargs:
            words[1] = f"({say(_literal(node.kwargs['alpha']))} * {words[1]})"
        lines.append(f"t{k} = {_WORDS[node.target].format(*words)}")
        value[node] = f"t{k}"
    for k, node in enumerate(outputs):
        result = value[node]
        if _value(node).dtype == torch.bool:
            result = f"({result}).to(tl.int8)"
        lines.append(f"tl.store(q{k} + {places[len(inputs) + k]}, {result}, mask=ok)")
    for k, node in enumerate(cluster.sums):
        term = f"tl.where(ok, {value[node.args[0]]}, 0.0).to({kinds[_sum_kind(node)]})"
        whole = f"tl.reshape({term}, (BM * BN,))" if kind == "product" else term
        lines.append(f"tl.store(z{k} + row * Z + z_first + tl.program_id(0), tl.sum({whole}, axis=0))")
    source = f"def fused({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in lines)
    if source not in _kernels:
        _kernels[source] = _jit(source)
    return _kernels[source]


def _jit(source: str) -> Any:
    name = f"<perfed-{hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # where Triton reads it from
    place: dict[str, Any] = {"tl": tl, "_NAN": tl.constexpr(tl.PropagateNan.ALL)}  # as PyTorch does
    exec(compile(source, name, "exec"), place)
    return triton.jit(place["fused"])
