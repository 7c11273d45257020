"""Generation of Triton kernels from the arithmetic of a step, one for each cluster of element-wise operations.

The text of a kernel is made of the cluster's operations and of how its tensors lie, and compiled once for each text.
Where an input is a concatenation, a row is worked on in segments, one for each piece; a piece that is a matrix product
is computed tile by tile where it is needed.
"""

# Arguments of a traced node can be anything.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalIterable=false

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, fx

from perfed.accel.kernels import precision
from perfed.accel.trace import Kind, kind_of, shape_of

aten = torch.ops.aten

# Operation -> the same in Triton; {0}, {1}, ... are its arguments.
WORDS: dict[Any, str] = {
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
_BLOCK = 512
_TILE = (32, 128)  # of a matrix product


@dataclass(eq=False)
class Cluster:
    """Hold element-wise operations on one shape that become one kernel."""

    nodes: list[fx.Node]
    shape: tuple[int, ...]
    sums: list[fx.Node] = field(default_factory=list)
    joined: fx.Node | None = None  # a concatenation read piece by piece
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    products: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pieces that are batched matrix products

    @property
    def pieces(self) -> list[fx.Node]:
        """Return the pieces that are joined, without empty ones, which may have another number of dimensions."""
        return [] if self.joined is None else [p for p in self.joined.args[0] if len(shape_of(p)) == 2]


def _literal(number: Any) -> str:
    if isinstance(number, bool):
        return str(number)
    return f"({float(number)!r})" if math.isfinite(number) else f'float("{number}")'


def constant(node: Any) -> str | None:
    """Return the text of a node that is a plain number; None where it is none."""
    if isinstance(node, int | float):
        return _literal(node)
    if isinstance(node, fx.Node) and "number" in node.meta:
        return _literal(node.meta["number"])
    if isinstance(node, fx.Node) and node.target in _FILLED:
        return _FILLED[node.target]
    if isinstance(node, fx.Node) and node.target is aten.full.default:
        return _literal(node.args[1])
    return None


def launch(cluster: Cluster, env: dict[Any, Any], place: dict[fx.Node, Tensor], part: str = "all") -> None:
    """Run a cluster.

    Args:
        cluster: what to run.
        env: the values of nodes; outputs and sums are added.
        place: memory for outputs; others get new memory.
        part: 'all', only the 'products', or the 'rest'.
    """
    factors = [n for product in cluster.products.values() for n in product.all_input_nodes]
    pieces = [p for p in cluster.pieces if p not in cluster.products]
    device = env[[*cluster.inputs, *factors, *pieces][0]].device
    width = cluster.shape
    out = {n: place[n] if n in place else _room(kind_of(n), device) for n in cluster.outputs}
    into = {n: t.view(torch.int8) if t.dtype == torch.bool else t for n, t in out.items()}
    given = {n: env[n].view(torch.int8) if env[n].dtype == torch.bool else env[n] for n in cluster.inputs}
    given = {n: t.expand(width) for n, t in given.items()}
    if cluster.joined is None and not cluster.sums:
        _run_flat(cluster, given, into)
    else:
        _run_rows(cluster, given, into, env, device, part)
    if part != "products":
        env.update(out)


def _room(like: Kind, device: torch.device) -> Tensor:
    """Return memory that lies as it did when the step was traced: what follows may look at it through a view."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)


class _Segment(NamedTuple):
    """Hold the columns of a row that one launch works on."""

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
    """Run row by row, in segments where an input is a concatenation."""
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
            text, stride = _row_place(t)
            places.append(text)
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
            kernel[(count, rows)](*pointers, *numbers, blocks, first, a, b, *sizes, *_TILE, 16, precision())
        first += count
    for n, parts in sums.items():
        total = parts.sum(1)
        env[n] = total[:, None] if len(n.args) > 2 and n.args[2] else total


def _sum_kind(node: fx.Node) -> torch.dtype:
    return node.kwargs.get("dtype") or kind_of(node.args[0]).dtype  # pyright: ignore


def is_large(piece: fx.Node, cluster: Cluster) -> bool:
    """Return True if a product is worth computing in the kernel, in a segment of its own."""
    return shape_of(piece)[1] * 8 > cluster.shape[1]


def _segments(cluster: Cluster, env: dict[Any, Any], part: str) -> list[_Segment]:
    """Cut a row into segments: each large piece alone, and small neighbours joined after all."""
    out: list[_Segment] = []
    waiting: list[Tensor] = []
    begin = 0

    def flush(end: int) -> None:
        if waiting:
            whole = waiting[0] if len(waiting) == 1 else torch.cat(waiting, 1)
            out.append(_Segment(end - whole.shape[1], end, whole))
            waiting.clear()

    for node in cluster.pieces:
        size = shape_of(node)[1]
        if size * 32 > cluster.shape[1]:  # enough for a launch of its own
            flush(begin)
            if node in cluster.products and part != "rest":
                a, b = (env[n] for n in cluster.products[node].args)
                out.append(_Segment(begin, begin + size, product=(a, b)))
            elif node not in cluster.products and part != "products":
                out.append(_Segment(begin, begin + size, env[node]))
        elif part != "products":
            waiting.append(env[node])
        begin += size
    flush(begin)
    return out


def _row_place(t: Tensor) -> tuple[str, int]:
    """Return the text by which a kernel finds (row, column) of a tensor, and the number in that text."""
    row, column = t.stride()
    if t.shape[1] == 1:
        column = 1  # there is one column only, wherever the next would be
    if column == 0:
        return ("0", 0) if row == 0 else ("row * {s}", row)
    if column == 1:
        # Written as a multiple of four, so that the compiler knows that 16 bytes may be read at once.
        return ("row * (4 * {s}) + col", row // 4) if row % 4 == 0 else ("row * {s} + col", row)
    raise ValueError("the numbers of a row must lie side by side")


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.stride(1) in (0, 1) or t.shape[1] == 1 else t.contiguous()


def _run_flat(cluster: Cluster, given: dict, into: dict) -> None:
    """Run over any shape, after merging dimensions that lie alike in all tensors."""
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
    """Return the fewest dimensions that describe all tensors, as sizes and each tensor's strides."""
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
    """Return the compiled kernel of a cluster for tensors that lie like this; `kind` is flat, rows or product."""
    tensors = [f"p{k}" for k in range(len(inputs))] + [f"q{k}" for k in range(len(outputs))]
    sums = [f"z{k}" for k in range(len(cluster.sums))]
    if kind == "flat":
        highest = max((int(w.split("}")[0]) for p in places for w in p.split("{s")[1:]), default=dims - 2)
        numbers = [f"s{k}" for k in range(max(highest + 1, dims - 1))]
        places = tuple(p.replace("{", "").replace("}", "") for p in places)
        names = [*tensors, *numbers, "N", "BLOCK: tl.constexpr"]
        lines = ["place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)", "ok = place < N"]
        for d in range(dims - 1, 0, -1):
            lines += [f"i{d} = place % s{d - 1}", f"place = place // s{d - 1}"]
        lines += ["i0 = place"]
    else:
        places = tuple(p.format(s=f"s{k}") for k, p in enumerate(places))
        names = [*tensors, *sums, *(f"s{k}" for k in range(len(tensors))), "Z", "z_first"]
        lines = (_ROWS if kind == "rows" else _PRODUCT).splitlines()
        names += _ROWS_NAMES if kind == "rows" else _PRODUCT_NAMES
    value: dict[fx.Node, str] = {}
    kinds = {torch.float32: "tl.float32", torch.float64: "tl.float64"}
    for k, node in enumerate(inputs):
        truth = " != 0" if kind_of(node).dtype == torch.bool else ""
        masked = ", mask=ok, other=0" if "col" in places[k] or "i" in places[k] else ""  # else one number for all
        lines.append(f"v{k} = tl.load(p{k} + {places[k]}{masked}){truth}")
        value[node] = f"v{k}"
    if kind == "product":
        value[cluster.joined] = "g"
    for k, node in enumerate(cluster.nodes):
        # Constants get their type, because Triton otherwise compares with numbers of single precision.
        tensors = [a for a in node.all_input_nodes if constant(a) is None]
        double = any(kind_of(a).dtype == torch.float64 for a in tensors)
        typed = (lambda text: f"tl.full((), {text}, tl.float64)") if double else (lambda text: text)
        words = [value[a] if isinstance(a, fx.Node) and a in value else typed(constant(a)) for a in node.args]
        if "alpha" in node.kwargs:
            words[1] = f"({typed(_literal(node.kwargs['alpha']))} * {words[1]})"
        lines.append(f"t{k} = {WORDS[node.target].format(*words)}")
        value[node] = f"t{k}"
    for k, node in enumerate(outputs):
        result = value[node]
        if kind_of(node).dtype == torch.bool:
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
