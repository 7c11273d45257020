"""The check that every setting matters: another value of it alone, all else alike, gives another outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

from perfed.contract.checks import CLOSE, Outcome, difference, play
from perfed.contract.toy import COHORTS, job, maker, networks
from perfed.core.errors import Problem
from perfed.core.fields import convert
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.engines.local import Sequential
from perfed.training.catalog import Entry, Field, common

# Client 0 takes part every time: what it remembers of two rounds ago differs from what it began the last one with.
LONG = ((0, 2, 3), (0, 1, 4), (0, 2, 3), (0, 1, 3))


class Setting(NamedTuple):
    """Circumstances in which another value may make a difference."""

    network: str
    cohorts: Any
    changed: dict[str, Any]  # other settings


class Evidence(NamedTuple):
    """What shows that a setting matters, or why it cannot be changed."""

    words: str  # such as 'mu = 0.15 in place of 0.1', or the sentence with which every other value is refused
    matters: bool


def check_settings(entry: Entry) -> None:
    """Check that changing any setting changes the outcome, or is refused with a reason."""
    empty = [name for name, evidence in evidences(entry) if evidence is None]
    names = ", ".join(f"'{name}'" for name in empty)
    assert not empty, (
        f"{names} {'changes' if len(empty) == 1 else 'change'} nothing, whatever else is set: a setting is used, or "
        "`check` refuses to have it changed, in a sentence"
    )


def evidences(entry: Entry) -> Iterator[tuple[str, Evidence | None]]:
    """Try every setting of a method.

    Args:
        entry: the method.

    Yields:
        A setting's name, and what shows that it matters; None where nothing does.
    """
    trial = _Trial(entry)
    for name, field in entry.fields.items():
        yield name, trial.evidence(name, field)


class _Trial:
    """Trains a method under various settings, each of them once."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self.makes = {network: maker(entry, network) for network in networks(entry)}
        self.outcomes: dict[Any, Outcome] = {}
        self.telling: list[Setting] = []  # circumstances, with other settings, in which something made a difference

    def evidence(self, name: str, field: Field) -> Evidence | None:
        """Return what shows that a setting matters; None where nothing does."""
        refusals, tried = [], False
        for setting in self.circumstances(name):
            make = self.makes[setting.network]
            for value in self.values(field, getattr(make(), name), make().model):
                try:
                    changed = make(**{**setting.changed, name: value})
                    before = getattr(make(), name)
                    others = {other: getattr(changed, other) for other in self.entry.fields if other != name}
                    plain = make(**{**others, name: before})  # alike but for this setting
                    outcomes = self.outcome(changed, setting), self.outcome(plain, setting)
                except Problem as problem:  # before it trains, or once it has models
                    refusals.append(str(problem))
                    continue
                tried = True
                if self.differ(*outcomes):
                    self.telling += [setting] * bool(setting.changed)
                    where = "".join(f", {other} = {value!r}" for other, value in setting.changed.items())
                    return Evidence(f"{name} = {value!r} in place of {before!r}{where}", True)
            if refusals and not tried:
                return Evidence(refusals[0], False)
        return None

    def circumstances(self, name: str) -> Iterator[Setting]:
        """Yield circumstances, from simple to rare: a setting may matter only where another has another value."""
        for network in self.makes:
            yield Setting(network, COHORTS[:2], {})
        for network in self.makes:
            yield Setting(network, LONG, {})
        yield from [setting for setting in self.telling if name not in setting.changed]
        make = next(iter(self.makes.values()))
        for other, field in self.entry.fields.items():
            if other != name and other not in common():
                for value in self.values(field, getattr(make(), other), make().model):
                    yield Setting(next(iter(self.makes)), LONG, {other: value})
        for changed in ({"optimizer": "adam"}, {"fine_tune": 1}):
            if name not in changed:
                yield Setting(next(iter(self.makes)), LONG, changed)

    def values(self, field: Field, now: Any, model: Model) -> list[Any]:
        """Return other values of a setting that its range allows."""
        parts = (*model.layers, *model.shapes)
        values = dict.fromkeys(other_values(field.kind, now, parts))
        return [value for value in values if value != now and _allowed(field, value)]

    def outcome(self, method: Method, setting: Setting) -> Outcome:
        """Return what a method ends with, trained now or before."""
        values = tuple(getattr(method, name) for name in self.entry.fields)
        key = (setting.network, setting.cohorts, values)
        if key not in self.outcomes:
            self.outcomes[key] = play(Sequential(job(method)), setting.cohorts)
        return self.outcomes[key]

    def differ(self, first: Outcome, second: Outcome) -> bool:
        """Return True if two outcomes differ in server, models, scores or bytes by more than rounding."""
        pairs = ((first.server, second.server), (_models(first), _models(second)), (first.traffic, second.traffic))
        return any(difference(*pair) > CLOSE for pair in pairs)


def _models(outcome: Outcome) -> Any:
    """Return models and scores without those that `fine_tune` adds whatever it does: of each as it was before."""
    return [{n: t for n, t in each.items() if n != "before"} for each in (*outcome.models.values(), outcome.scores)]


def other_values(kind: Any, now: Any, parts: Iterable[str] = ()) -> list[Any]:
    """Return values to try for a setting; the one that it has may be among them.

    Args:
        kind: its type.
        now: its value.
        parts: names of the network's layers and tensors, which text may name.
    """
    if get_args(kind):
        return list(get_args(kind))
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int):
        return [now + 1, now + 2, now - 1, 0, 1, 2]  # the toy has few samples: of a limit, small values bite
    if isinstance(now, float):
        return [now * 0.5 + 0.1, now * 0.5, now * 1.5, now + 1.0, now * 0.01]  # the last: a limit, made to bite
    return ["head", "body", "none", *parts]  # text names a part of the model


def _allowed(field: Field, value: Any) -> bool:
    try:
        convert(value, field.kind, field.bounds, field.name)
    except Problem:
        return False
    return True
