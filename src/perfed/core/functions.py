"""Functions of PyTorch in a form that is the same for one client and for many.

Some draw random numbers that no seed of a run reaches (dropout as a function, the dropout of attention and between
recurrent layers): here they draw from the batch's key. Others cannot be batched over clients (recurrent layers, some
forms of attention): under vmap they are computed from operations that can. Everything else is PyTorch's own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from perfed.core.errors import Problem
from perfed.core.random import derive, uniform

_torch: Any = torch  # whose own functions have no declarations
_SALT = 0  # of keys; those of the layers `Drop` begin with 1

State = Any  # what a cell carries from token to token: a tensor, or (h, c)
Draw = Callable[[Tensor, Tensor, int, int, tuple[int, ...]], Tensor]


def plain_draw(like: Tensor, key: Tensor, salt: int, call: int, shape: tuple[int, ...]) -> Tensor:
    """Draw numbers in [0, 1) of the type of `like` for one call (its number) of one place with dropout (its salt)."""
    return uniform(derive(key, salt, call), shape, like.dtype)


class Alike(TorchFunctionMode):
    """Stand in for such functions while a network runs.

    Attributes:
        met: one of them has been called, which counts where clients are batched.
        drew: one of them has drawn random numbers.
    """

    def __init__(self, key: Tensor | None, train: bool, draw: Draw):
        """Begin a pass of a network.

        Args:
            key: what random numbers are drawn from.
            train: it is a training pass.
            draw: draws random numbers, as `plain_draw` does.
        """
        super().__init__()
        self.key, self.train, self.draw, self.calls = key, train, draw, 0
        self.met = self.drew = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = _STAND_INS.get(func)
        if stand_in is None:
            return func(*args, **(kwargs or {}))
        self.met = True
        return stand_in(self, *args, **(kwargs or {}))

    def keep(self, x: Tensor, shape: Sequence[int], p: float) -> Tensor:
        """Draw which units of this shape stay, where each is dropped with probability p; x tells the kind of number."""
        if not self.train:
            raise Problem(
                "the network drops units in evaluation, too: give F.dropout and scaled_dot_product_attention a dropout "
                "of 0 unless self.training"
            )
        if self.key is None:
            raise RuntimeError("dropout in training needs the batch's key: pass key=batch.key")
        self.drew = True
        self.calls += 1
        return self.draw(x, self.key, _SALT, self.calls, tuple(shape)) >= p

    def drop(
        self, x: Tensor, p: float, training: bool = True, inplace: bool = False, units: int | None = None
    ) -> Tensor:
        """Drop units of x, or whole channels where `units` says how many of its dimensions tell them apart."""
        if not training or p == 0:
            return x
        shape = x.shape if units is None else (*x.shape[:units], *(1,) * (x.dim() - units))
        keep = self.keep(x, shape, p) if p < 1 else torch.zeros((), dtype=torch.bool, device=x.device)
        scale = 1 / (1 - p) if p < 1 else 0.0
        return x.mul_(keep).mul_(scale) if inplace else x * keep * scale


def _batched(*tensors: Any) -> bool:
    return any(isinstance(t, Tensor) and is_functorch_wrapped_tensor(t) for t in tensors)


# ---------------------------------------------------------------------- dropout


def _dropout(mode: Alike, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return mode.drop(input, p, training, inplace)


def _dropout_of_channels(dims: int | None) -> Callable[..., Tensor]:
    """Return the dropout of whole channels, for inputs [samples, channels, ...] or one such sample of `dims`."""

    def stand_in(mode: Alike, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return mode.drop(input, p, training, inplace, units=1 if input.dim() == dims else 2)

    return stand_in


# ---------------------------------------------------------------------- attention


def _attention(
    mode: Alike, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    slow = _batched(query, key, value)  # vmap would run one client after another, at the latest in the gradient
    if not dropout_p and not slow:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    whole: Any = torch.ops.aten._scaled_dot_product_attention_math
    out, attention = whole(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not dropout_p:
        return out
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return mode.drop(attention, dropout_p) @ value


def _multi_head(mode: Alike, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own code of nn.MultiheadAttention, with our functions in place of the two that draw."""
    theirs: Any = F.multi_head_attention_forward
    names = {
        "dropout": lambda *a, **k: _dropout(mode, *a, **k),
        "scaled_dot_product_attention": lambda *a, **k: _attention(mode, *a, **k),
    }
    ours = types.FunctionType(theirs.__code__, theirs.__globals__ | names, argdefs=theirs.__defaults__)
    return ours(*args, **kwargs)


def _left_aligned(mode: Alike, x: Tensor, mask: Tensor) -> bool:  # noqa: ARG001
    """Tell nn.TransformerEncoder whether it may leave masked tokens out: of a batch of clients it may not."""
    return not _batched(x, mask) and _torch._nested_tensor_from_mask_left_aligned(x, mask)


# ---------------------------------------------------------------------- recurrent layers


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, h, recurrent: activation(x + recurrent(h))


def _gru_step(x: Tensor, h: Tensor, recurrent: Callable[[Tensor], Tensor]) -> Tensor:
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = x.chunk(3, -1), recurrent(h).chunk(3, -1)
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (h - new) * (update_x + update_h).sigmoid() + new


def _lstm_step(x: Tensor, state: State, recurrent: Callable[[Tensor], Tensor], project: Any = None) -> State:
    h, c = state
    enter, forget, cell, leave = (x + recurrent(h)).chunk(4, -1)
    c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
    h = leave.sigmoid() * c.tanh()
    return (h if project is None else F.linear(h, project)), c


_STEPS: dict[Any, Callable[..., State]] = {
    torch.gru: _gru_step,
    torch.lstm: _lstm_step,
    torch.rnn_tanh: _rnn_step(torch.tanh),
    torch.rnn_relu: _rnn_step(torch.relu),
}


def _recurrent(function: Any) -> Callable[..., Any]:
    """Return the stand-in of a recurrent layer, which is PyTorch's own where that can be used."""
    step = _STEPS[function]

    def stand_in(mode: Alike, *args: Any) -> Any:
        if isinstance(args[3], list | tuple):  # a packed sequence: its lengths are numbers, and samples differ in them
            if args[7] and args[6] and args[5] > 1:
                raise Problem("dropout between recurrent layers has no keyed form for packed sequences: use dropout=0")
            return function(*args)
        x, hx, params, _, layers, dropout, train, both, batch_first = args
        drops = train and dropout > 0 and layers > 1
        if not drops and not _batched(x, *params):
            return function(*args)
        x = x.transpose(0, 1) if batch_first else x
        directions = 2 if both else 1
        each = len(params) // (layers * directions)  # weights of a layer in one direction
        last: list[State] = []
        for layer in range(layers):
            ways = []
            for way in range(directions):
                place = layer * directions + way
                start = (hx[0][place], hx[1][place]) if function is torch.lstm else hx[place]
                out, end = _unroll(step, x, start, params[place * each : (place + 1) * each], backwards=way == 1)
                ways.append(out)
                last.append(end)
            x = ways[0] if len(ways) == 1 else torch.cat(ways, -1)
            if drops and layer < layers - 1:
                x = mode.drop(x.transpose(0, 1), dropout).transpose(0, 1)  # samples first, whatever stands beside them
        x = x.transpose(0, 1) if batch_first else x
        if function is torch.lstm:
            return x, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])
        return x, torch.stack(last)

    return stand_in


def _unroll(
    step: Callable[..., State], x: Tensor, state: State, weights: Sequence[Tensor], backwards: bool
) -> tuple[Tensor, State]:
    """Run one layer in one direction over x [length, samples, features]: its outputs, and its last state."""
    into, recur, *rest = weights
    biases, project = (rest[:2], rest[2:]) if len(rest) > 1 else ((None, None), rest)
    recurrent = lambda h: F.linear(h, recur, biases[1])
    outputs, entering = [], F.linear(x, into, biases[0])  # of all tokens at once
    for token in (entering.flip(0) if backwards else entering).unbind():
        state = step(token, state, recurrent, *project)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _cell(function: Any, step: Callable[..., State]) -> Callable[..., State]:
    """Return the stand-in of a recurrent cell."""

    def stand_in(mode: Alike, input: Tensor, hx: State, into: Tensor, recur: Tensor, *biases: Any) -> State:  # noqa: ARG001
        if not _batched(input, into):
            return function(input, hx, into, recur, *biases)
        b_into, b_recur = biases or (None, None)
        state = tuple(hx) if isinstance(hx, list | tuple) else hx
        return step(F.linear(input, into, b_into), state, lambda h: F.linear(h, recur, b_recur))

    return stand_in


# ---------------------------------------------------------------------- pooling


def _mean_of_all(function: Callable[..., Tensor], dims: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return the stand-in of adaptive pooling: to one pixel it is a mean, whose strides PyTorch then sets in place."""

    def stand_in(mode: Alike, input: Tensor, output_size: Any) -> Tensor:  # noqa: ARG001
        size = output_size if isinstance(output_size, list | tuple) else (output_size,)
        if _batched(input) and all(number == 1 for number in size):
            return input.mean(dims, keepdim=True)
        return function(input, output_size)

    return stand_in


# ---------------------------------------------------------------------- parametrised weights


def _weight_norm(mode: Alike, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:  # noqa: ARG001
    if not _batched(v, g):
        return _torch._weight_norm(v, g, dim)
    others = [d for d in range(v.dim()) if dim < 0 or d != dim]  # -1 is the norm of everything
    return v * (g / v.square().sum(others, keepdim=dim >= 0).sqrt())


def _normalize(mode: Alike, input: Tensor, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:  # noqa: ARG001
    """Normalise as spectral norm does, which writes over its buffers."""
    if out is None or not _batched(input, out):
        return F.normalize(input, *args, out=out, **kwargs)
    return out.copy_(F.normalize(input, *args, **kwargs))


_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.dropout_: lambda mode, input, p, train: mode.drop(input, p, train, True),
    F.dropout1d: _dropout_of_channels(2),
    F.dropout2d: _dropout_of_channels(None),
    F.dropout3d: _dropout_of_channels(4),
    torch.feature_dropout: _dropout_of_channels(None),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    **{function: _recurrent(function) for function in _STEPS},
    torch.gru_cell: _cell(torch.gru_cell, _gru_step),
    torch.lstm_cell: _cell(torch.lstm_cell, _lstm_step),
    torch.rnn_tanh_cell: _cell(torch.rnn_tanh_cell, _STEPS[torch.rnn_tanh]),
    torch.rnn_relu_cell: _cell(torch.rnn_relu_cell, _STEPS[torch.rnn_relu]),
    F.adaptive_avg_pool2d: _mean_of_all(F.adaptive_avg_pool2d, (-2, -1)),
    F.adaptive_avg_pool3d: _mean_of_all(F.adaptive_avg_pool3d, (-3, -2, -1)),
    _torch._weight_norm: _weight_norm,
    _torch._nested_tensor_from_mask_left_aligned: _left_aligned,
    F.normalize: _normalize,
}
