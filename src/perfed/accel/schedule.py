"""A batched step as a short program, in which arithmetic on the same numbers is one kernel.

A method writes theta - lr * (g + lam * (theta - w)); run as it stands, each sign is a pass over all clients' models
through the GPU's memory, and those passes cost more than the network. A `Program` joins runs of element-wise operations
into one generated Triton kernel each. Such a kernel also computes row sums of its results. It reads a gradient from its
pieces, which then need not be joined, and computes the largest of them, the matrix products, where it needs them. Where
an output may overwrite the input it came from, it does. All other operations run as they are.
"""

# Arguments of a traced node can be anything.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from perfed.accel.codegen import WORDS, Cluster, constant, is_large, launch
from perfed.accel.cuda_graph import queue
from perfed.accel.kernels.rows import column_sum, thin_product
from perfed.accel.trace import Kind, constant_of, kind_of, shape_of

aten = torch.ops.aten

_WITH_ALPHA = {aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar}
_LARGE = 4096  # numbers of a row whose sum is taken by the kernel that makes it
_FEW = 512  # rows whose sums are better taken column by column
_MOST = 1 << 16  # rows that a launch may have along its second axis
_FEW_SAMPLES, _LONG, _WIDE = 32, 1024, 1 << 22  # batch, inputs and weights of a product that waits for its weights
_DEPTH = 128  # terms of a product that is computed where it is needed; longer ones are left to the library


def _simple(node: fx.Node) -> bool:
    """Return True if a node is element-wise arithmetic of one kind of float that `codegen` knows."""
    value = kind_of(node)
    if node.op != "call_function" or node.target not in WORDS or not isinstance(value, Kind):
        return False
    if node.kwargs and not set(node.kwargs) <= {"alpha"}:
        return False
    if node.target in _WITH_ALPHA and len(node.args) > 2:  # by place, where the words do not look
        return False
    kinds = {value.dtype} if value.dtype != torch.bool else set()
    if all(constant(arg) is not None for arg in node.args):
        return False
    for place, arg in enumerate(node.args):
        if constant(arg) is not None:
            continue
        if not isinstance(arg, fx.Node) or not isinstance(kind_of(arg), Kind):
            return False
        if kind_of(arg).dtype != torch.bool:
            kinds.add(kind_of(arg).dtype)
        elif node.target is not aten.mul.Tensor and (node.target is not aten.where.self or place != 0):
            return False
    return len(kinds) == 1 and kinds <= {torch.float32, torch.float64} and len(value.shape) > 0


def _row_sum(node: fx.Node) -> bool:
    """Return True if a node sums long rows: the kernel that makes them can sum them too."""
    if node.target is not aten.sum.dim_IntList or not isinstance(node.args[0], fx.Node):
        return False
    shape, kind = shape_of(node.args[0]), node.kwargs.get("dtype")
    if not kind_of(node.args[0]).dtype.is_floating_point or kind_of(node.args[0]).stride[-1] != 1:
        return False
    return len(shape) == 2 and list(node.args[1] or ()) in ([1], [-1]) and shape[1] >= _LARGE and kind in (
        None, torch.float32, torch.float64,
    )  # fmt: skip


def _column_sum(node: fx.Node) -> bool:
    """Return True if a node sums a few rows of every client, as a bias's gradient does."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or not isinstance(kind_of(node.args[0]), Kind):
        return False
    shape, stride, dtype = kind_of(node.args[0])
    if len(shape) != 3 or list(node.args[1] or ()) not in ([1], [-2]) or dtype not in (torch.float32, torch.float64):
        return False
    sizes = 0 < shape[0] < _MOST and 0 < shape[1] <= _FEW and shape[2] > 0
    return stride == (shape[1] * shape[2], shape[2], 1) and sizes


def _thin(node: fx.Node) -> bool:
    """Return True if a node is the product of a few samples and wide weights, as a large layer's output is."""
    if node.target is not aten.bmm.default:
        return False
    a, b = map(kind_of, node.args)
    (C, B, K), N = a.shape, b.shape[2]
    laid = a.stride == (B * K, K, 1) and b.stride[1:] == (1, K) and a.dtype == torch.float32
    return laid and 0 < B <= _FEW_SAMPLES and K >= _LONG and C * N * K >= _WIDE and C < _MOST


class Program:
    """Run operations in order, those that were joined as one."""

    def __init__(self, graph: fx.Graph):
        self.holders = [n for n in graph.nodes if n.op == "placeholder"]
        end = next(n for n in graph.nodes if n.op == "output")
        self.results: list[Any] = list(end.args[0])
        self.fixed = _fixed(graph)
        todo = [n for n in graph.nodes if n.op == "call_function" and n not in self.fixed]
        for node in filter(_column_sum, todo):
            node.target, node.args = column_sum, (node.args[0], len(node.args) > 2 and node.args[2])
        for node in filter(_thin, todo):
            node.target = thin_product
        self.items = _schedule(todo, set(self.results))
        for item in self.items:
            if isinstance(item, Cluster):
                self._take_products(item)
        self.last_use = self._last_uses()
        self.safe = self._overwritable()
        self.ahead = self._ahead()

    def _take_products(self, cluster: Cluster) -> None:
        """Let the kernel compute large matrix products: a gradient that only moves theta is never written."""
        for piece in cluster.pieces:
            chain = [piece]
            while _is_view(chain[-1]) and len(chain[-1].users) == 1 and chain[-1].all_input_nodes:
                chain.append(chain[-1].all_input_nodes[0])
            product = chain[-1]
            kind, made = kind_of(piece), kind_of(product)
            if product.target is not aten.bmm.default or len(product.users) != 1 or not isinstance(kind, Kind):
                continue
            # Views that end in rows without gaps, of a product without gaps: the same numbers in the same order.
            (count, m, n), depth = made.shape, shape_of(product.args[0])[2]
            whole = kind.shape == (count, m * n)  # not a part of it, nor several products in a row
            plain = whole and kind.stride == (m * n, 1) and made.stride == (m * n, n, 1)
            if plain and kind.dtype == torch.float32 and 0 < depth <= _DEPTH and is_large(piece, cluster):
                cluster.products[piece] = product
                self.items = [item for item in self.items if item not in chain]

    def _reads(self, item: fx.Node | Cluster) -> list[fx.Node]:
        if isinstance(item, fx.Node):
            return list(item.all_input_nodes)
        pieces = item.pieces
        apart = [n for product in item.products.values() for n in product.all_input_nodes]
        return [*item.inputs, *(p for p in pieces if p not in item.products), *apart]

    def _last_uses(self) -> list[list[fx.Node]]:
        """Return for each item what nobody reads after it."""
        last: dict[fx.Node, int] = {}
        for place, item in enumerate(self.items):
            for node in self._reads(item):
                last[node] = place
        kept = set(self.results) | set(self.holders)
        out: list[list[fx.Node]] = [[] for _ in self.items]
        for node, place in last.items():
            if node not in kept:
                out[place].append(node)
        return out

    def _roots(self) -> dict[fx.Node, fx.Node]:
        """Return what each view is a view of."""
        root: dict[fx.Node, fx.Node] = {}
        for item in self.items:
            if isinstance(item, fx.Node) and item.all_input_nodes and _is_view(item):
                source = item.all_input_nodes[0]
                root[item] = root.get(source, source)
        return root

    def _overwritable(self) -> dict[fx.Node, int]:
        """Return results that may overwrite argument k: nobody looks at it after their kernel, nor through a view."""
        root, last = self._roots(), {}
        for place, item in enumerate(self.items):
            for node in self._reads(item):
                last[root.get(node, node)] = place
        old = lambda k, r: root.get(r, r) in self.holders and r is not self.holders[k]
        self.borrowed = {k for k, r in enumerate(self.results) if k >= len(self.holders) or old(k, r)}
        safe: dict[fx.Node, int] = {}
        for place, item in enumerate(self.items):
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
                        alike = kind_of(holder) == kind_of(node)
                        if free and last.get(holder, -1) <= place and alike:
                            safe[node] = k
        return safe

    def _ahead(self) -> dict[int, list[Cluster]]:
        """Return which clusters may add their products before an item, beside everything that follows it.

        Moving all clients' numbers waits for the memory, the gradients of earlier layers for the arithmetic: a GPU does
        both at once. It is allowed once their inputs are there and nobody else reads what they overwrite.
        """
        root = self._roots()
        made = {n: place for place, item in enumerate(self.items) for n in _makes(item)}
        ahead: dict[int, list[Cluster]] = {}
        for place, item in enumerate(self.items):
            if not isinstance(item, Cluster) or not item.products or item.sums:
                continue
            if not all(n in self.safe for n in item.outputs):
                continue
            factors = [n for product in item.products.values() for n in product.all_input_nodes]
            first = 1 + max(made.get(n, -1) for n in [*item.inputs, *factors])
            over = {self.holders[self.safe[n]] for n in item.outputs}
            for earlier, other in enumerate(self.items[:place]):
                if any(root.get(n, n) in over for n in self._reads(other)):
                    first = max(first, earlier + 1)
            if first < place:
                ahead.setdefault(first, []).append(item)
        return ahead

    def __call__(self, *args: Tensor, into: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the results; where `into` has a place for result k, which may be argument k, it is written there."""
        env: dict[Any, Any] = dict(zip(self.holders, args, strict=True)) | self.fixed
        beside = _Beside()
        for number, (item, done) in enumerate(zip(self.items, self.last_use, strict=True)):
            for cluster in self.ahead.get(number, ()):
                place = self._place(cluster, into)
                if len(place) == len(cluster.outputs):
                    beside.begun.add(cluster)
                    with beside(into[0].device):
                        launch(cluster, env, place, "products")
            if isinstance(item, Cluster):
                begun = item in beside.begun
                if begun:
                    beside.join()
                launch(item, env, self._place(item, into), "rest" if begun else "all")
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
    """Run what nobody waits for in a second queue of a GPU; elsewhere run it at once."""

    def __init__(self) -> None:
        self.begun: set[Cluster] = set()
        self.queue: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        self.queue = queue(device, 0)
        self.queue.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.queue):
            yield

    def join(self) -> None:
        if self.queue is not None:
            torch.cuda.current_stream().wait_stream(self.queue)


def _fixed(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Compute what depends on no argument once; a single number is noted at its node, to be written into kernels."""
    fixed: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            fixed[node] = constant_of(graph, node)
        elif node.op == "call_function" and all(n in fixed for n in node.all_input_nodes) and not _random(node):
            fixed[node] = node.target(*map_arg(node.args, fixed.get), **map_arg(node.kwargs, fixed.get))
        if isinstance(fixed.get(node), Tensor) and fixed[node].dim() == 0:
            node.meta["number"] = fixed[node].item()
    return fixed


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


# Views whose declaration does not say so.
_VIEWS = {
    operator.getitem, aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
}  # fmt: skip


def _is_view(node: fx.Node) -> bool:
    if node.target in _VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


# ---------------------------------------------------------------------------------------------------- joining


def _schedule(nodes: list[fx.Node], results: set[Any]) -> list[fx.Node | Cluster]:
    """Join nodes to clusters, and return all in an order in which everything is made before it is read."""
    group: dict[fx.Node, int] = {}  # node -> number of its group; groups of one are ordinary nodes
    members: dict[int, list[fx.Node]] = {}
    for number, node in enumerate(nodes):
        group[node], members[number] = number, [node]

    def after(number: int) -> set[int]:
        return {group[user] for n in members[number] for user in n.users if user in group} - {number}

    def would_cycle(parts: set[int]) -> bool:
        """Return True if a path leaves these groups and comes back."""
        seen: set[int] = set()
        todo = [s for p in parts for s in after(p) if s not in parts]
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            for following in after(number):
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
            if source in group and _simple(source) and shape_of(source) == shape_of(node):
                parts = {group[node], group[source]}
                if len(parts) == 2 and not would_cycle(parts):
                    join(parts)
    for node in nodes:  # a row sum belongs to the kernel that makes the rows
        if _row_sum(node) and node.args[0] in group and _simple(node.args[0]):
            parts = {group[node], group[node.args[0]]}
            if len(parts) == 2 and not would_cycle(parts):
                join(parts)
    position = {node: number for number, node in enumerate(nodes)}
    clusters: dict[int, Cluster] = {}
    for number, inside in members.items():
        inside.sort(key=position.__getitem__)
        if len(inside) > 1 or _worth_it(inside[0], results):
            made = [n for n in inside if not _row_sum(n)]
            clusters[number] = Cluster(made, shape_of(made[0]), [n for n in inside if _row_sum(n)])
    for number, cluster in clusters.items():
        _finish(cluster, members[number], results)
    absorbed = {c.joined for c in clusters.values() if c.joined is not None}
    order = _sorted(members, after)
    made = [clusters[k] if k in clusters else members[k][0] for k in order if members[k][0] not in absorbed]
    return _views_first(made)


def _views_first(items: list[fx.Node | Cluster]) -> list[fx.Node | Cluster]:
    """Move views right after what they look at: they cost nothing, and what needs them may begin early."""
    following: dict[fx.Node | None, list[fx.Node | Cluster]] = {}
    maker = {node: item for item in items for node in _makes(item)}
    rest: list[fx.Node | Cluster] = []
    for item in items:
        source = item.all_input_nodes if isinstance(item, fx.Node) and _is_view(item) else ()
        if len(source) == 1 and source[0] in maker:
            following.setdefault(source[0], []).append(item)
        else:
            rest.append(item)
    out: list[fx.Node | Cluster] = []
    while rest:
        item = rest.pop(0)
        out.append(item)
        rest[:0] = [view for node in _makes(item) for view in following.pop(node, ())]
    return out


def _worth_it(node: fx.Node, results: set[Any]) -> bool:
    """Return True if a single operation is better as a kernel: it can overwrite its argument, or read pieces."""
    return _simple(node) and (node in results or any(n.target is aten.cat.default for n in node.all_input_nodes))


def _finish(cluster: Cluster, inside: list[fx.Node], results: set[Any]) -> None:
    seen = dict.fromkeys(
        a for n in cluster.nodes for a in n.args if isinstance(a, fx.Node) and a not in inside and constant(a) is None
    )
    cluster.outputs = [n for n in cluster.nodes if n in results or any(u not in inside for u in n.users)]
    rows = len(cluster.shape) == 2 and all(kind_of(n).stride[1] == 1 for n in cluster.outputs)  # not columns
    for node in seen:
        whole = rows and shape_of(node) == cluster.shape
        if node.target is aten.cat.default and whole and node not in results and cluster.joined is None:
            dim = node.args[1] if len(node.args) > 1 else 0
            if dim in (1, -1) and all(user in inside for user in node.users):
                cluster.joined = node
    cluster.inputs = [n for n in seen if n is not cluster.joined]


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
