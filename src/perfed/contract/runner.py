"""Run the contract on a method file, check after check: `perfed check FILE`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perfed.contract import checks, rules, settings
from perfed.contract.checks import ENGINES
from perfed.contract.toy import networks
from perfed.core.errors import ClientError, Problem
from perfed.engines.local import reason_of
from perfed.engines.rules import is_own, place, rule_broken
from perfed.training.catalog import Entry


class Check(NamedTuple):
    """One check, and what it builds on: where that does not hold, its own sentence would be about the same mistake."""

    title: str
    run: Callable[[Any], None]
    needs: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """What a check found."""

    check: str
    ok: bool | None  # None: not tried, for what it builds on does not hold
    error: str | None = None


RUNS, PURE, SAME = "it trains and predicts", "nothing is changed in place", "the same seed gives the same result"
KEEPS, FORM, LEARNS = "nothing stays on the method", "states keep their form", "it learns where clients disagree"
FILLING, EVALUATES = "the filling of batches counts nowhere", "it says what it evaluates"

RULES = (
    Check(RUNS, rules.check_runs),
    Check(KEEPS, rules.check_keeps_nothing, (RUNS,)),
    Check(FORM, rules.check_stable, (RUNS,)),
    Check(PURE, rules.check_pure, (RUNS, FORM)),
    Check(SAME, rules.check_repeatable, (KEEPS, PURE)),
    Check("test samples change nothing", rules.check_test_split, (SAME,)),
    Check(FILLING, rules.check_filling, (SAME,)),
    Check("a tensor is in one compartment", rules.check_compartments, (SAME,)),
    Check(EVALUATES, rules.check_evaluates, (SAME,)),
    Check("BatchNorm statistics move, and stay what they can be", rules.check_statistics, (SAME,)),
    Check("what is frozen stays so", rules.check_frozen, (SAME,)),
)
FOLLOWS = (
    Check("state survives saving and loading", checks.check_saved),
    Check("every hyper-parameter matters", settings.check_settings),
    Check(LEARNS, checks.check_learns),
)
DIFFER = Check("every engine takes clients whose networks differ", checks.check_networks)
BATCHED = (
    Check("compiled steps equal plain ones", checks.check_compiled),
    Check("several runs in one batch equal each alone", checks.check_together),
    Check("vectorised equals sequential under a schedule, clipped", checks.check_options),
    Check("every task is learned, or refused by its name", checks.check_tasks),
)


def plan(entry: Entry) -> list[Check]:
    """Return the checks of a method, from causes to what follows from them.

    Args:
        entry: the method's catalog entry.
    """
    causes = tuple(check.title for check in RULES)
    title = lambda engine, network: f"{engine} equals sequential, {network} network"
    suited, engines = networks(entry), []
    for engine in ENGINES:
        needs = (*causes, *(title("vectorised", network) for network in suited if engine == "vectorised in blocks"))
        for number, network in enumerate(suited):
            before = tuple(title(engine, earlier) for earlier in suited[:number])
            run = partial(checks.check_engines, network=network, engine=engine)
            engines.append(Check(title(engine, network), run, (*needs, *before)))
    batched = tuple(check.title for check in engines if check.title.startswith("vectorised"))
    follows = (*FOLLOWS, *([DIFFER] if entry.load().own_networks and len(suited) > 1 else []))
    later = [check._replace(needs=causes) for check in follows]
    return [*RULES, *engines, *(check._replace(needs=(*causes, *batched)) for check in BATCHED), *later]


def check_method(entry: Entry) -> Iterator[Verdict]:
    """Run every check on a method, one after another.

    Args:
        entry: the method's catalog entry.

    Yields:
        What each check found.
    """
    torch.set_num_threads(1)
    yield from carried_out(plan(entry), entry)


def carried_out(planned: list[Check], subject: Any) -> Iterator[Verdict]:
    """Carry out checks; those that build on what does not hold are not tried.

    Args:
        planned: the checks, each after what it builds on.
        subject: what is checked.

    Yields:
        What each check found.
    """
    wrong: set[str] = set()
    for check in planned:
        verdict = _verdict(check, subject) if wrong.isdisjoint(check.needs) else Verdict(check.title, None)
        if not verdict.ok:
            wrong.add(check.title)
        yield verdict


def _verdict(check: Check, subject: Any) -> Verdict:
    try:
        check.run(subject)
    except Exception as error:
        return Verdict(check.title, False, sentence(error))
    return Verdict(check.title, True)


def sentence(error: Exception) -> str:
    """Return what went wrong in one line, with the line of the method's file where an error comes from there.

    Args:
        error: what a check raised.
    """
    if isinstance(error, Problem | AssertionError):
        return " ".join(str(error).split())
    if isinstance(error, ClientError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # which of the toy clients it was helps nobody
    where = place(error)
    if isinstance(error, ClientError):  # of a worker process: its traceback is a note
        frames = re.findall(r'File "([^"]*)", line (\d+)', "".join(getattr(error, "__notes__", ())))
        own = [f"{Path(name).name}, line {line}" for name, line in frames if is_own(name)]
        where = own[-1] if own else ""
    text = rule_broken(error) or reason_of(error)
    return f"{where}: {text}" if where else text
