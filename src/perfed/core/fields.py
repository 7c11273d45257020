"""Settings as dataclass fields: each says what it means and what is allowed, once, where it is declared."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, Literal, get_args, get_origin

from perfed.core.errors import Problem

Evaluates = Literal["own", "assembled", "adapted", "global"]  # what a method may say that it evaluates


def hyper(
    default: Any,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    toy: Any = None,
) -> Any:
    """Declare a setting: a dataclass field with a default, one line of meaning and its allowed range.

    `toy` is what the contract's small federation is trained with in place of the default, where that would take long
    there or show nothing.

    >>> hyper(0.1, "weight of the proximal term; 0 is FedAvg", at_least=0).metadata["range"]
    'at least 0'
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    bounds = {word: value for word, value in bounds.items() if value is not None}
    text = " and ".join(f"{word} {value:g}" for word, value in bounds.items())
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "bounds": bounds, "range": text, "toy": toy}
    )


_INSIDE = {
    "at least": lambda v, b: v >= b,
    "above": lambda v, b: v > b,
    "at most": lambda v, b: v <= b,
    "below": lambda v, b: v < b,
}


def convert(value: Any, kind: Any, bounds: dict[str, float], where: str) -> Any:
    """Return `value`, perhaps typed as text, as `kind`; raise a Problem that names `where` if it is none."""
    if isinstance(kind, types.UnionType) or get_origin(kind) is typing.Union:
        if value is None or value == "none":
            return None
        kind = next(k for k in get_args(kind) if k is not types.NoneType)
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        if value not in allowed:
            raise Problem(f"{where} must be one of {', '.join(map(str, allowed))}, not {value!r}")
        return value
    if kind is bool:
        named = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in named:
            return named[value.lower()]
        if not isinstance(value, bool):
            raise Problem(f"{where} must be true or false, not {value!r}")
        return value
    if kind in (int, float):
        number = _number(value, kind, where)
        for word, bound in bounds.items():
            if not _INSIDE[word](number, bound):
                raise Problem(f"{where} must be {word} {bound:g}, not {number:g}")
        return number
    if kind is str:
        if not isinstance(value, str):
            raise Problem(f"{where} must be text, not {value!r}")
        if "\0" in value:
            raise Problem(f"{where} contains a null character")
        return value
    raise TypeError(f"{where} has a type that settings cannot have: {kind}")


def _number(value: Any, kind: type, where: str) -> Any:
    word = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Problem(f"{where} must be {word}, not {value!r}")
    try:
        number = float(value) if kind is float else int(value)
    except (ValueError, OverflowError):
        raise Problem(f"{where} must be {word}, not {value!r}") from None
    if kind is int and isinstance(value, float) and value != number:
        raise Problem(f"{where} must be {word}, not {value!r}")
    if kind is float and not math.isfinite(number):
        raise Problem(f"{where} must be finite, not {value!r}")
    if abs(number) > 1e15:
        raise Problem(f"{where} is too large: {value!r}")
    return number


_hints = functools.cache(typing.get_type_hints)  # a class's annotations are evaluated anew in every call


def checked(owner: Any, prefix: str, skip: tuple[str, ...] = ()) -> None:
    """Convert and check every field of a (frozen) dataclass instance in place; called from `__post_init__`."""
    hints = _hints(type(owner))
    for field in dataclasses.fields(owner):
        if field.name not in skip:
            where = f"{prefix}.{field.name}" if prefix else field.name
            value = convert(getattr(owner, field.name), hints[field.name], field.metadata.get("bounds", {}), where)
            object.__setattr__(owner, field.name, value)
