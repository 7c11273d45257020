"""The checks of a treatment of uploads: what `perfed check NAME` runs for a file of `wire`.

The halves are given uploads of every form that a method may send, then carried through whole runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from perfed.contract.checks import CLOSE, ENGINES, compare, difference, play
from perfed.contract.rules import random_states
from perfed.contract.runner import Check, Verdict, carried_out
from perfed.contract.toy import job, maker, toy_clients
from perfed.core.messages import Up, Uploads
from perfed.core.random import derive
from perfed.core.tree import leaves, stack, tree_map
from perfed.engines.base import kind_of
from perfed.engines.forms import fault, kinds
from perfed.engines.local import Sequential
from perfed.training.catalog import methods
from perfed.wire.base import Transform

CLIENTS = 3
UPLOADS = {  # what methods send -> the upload of a client, from numbers of its own
    "one tensor": lambda numbers: Up(mean=numbers),
    "trees": lambda numbers: Up(mean={"w": numbers, "c": (numbers[:2], numbers[0])}, own={"g": [numbers, numbers[1]]}),
    "nothing": lambda numbers: Up(),  # noqa: ARG005
    "rows of whole numbers": lambda numbers: Up(own={"n": (100 * numbers).long(), "yes": numbers > 0}),
    "a weight": lambda numbers: Up(mean=numbers, weight=numbers[0].abs()),
    "weights of tensors": lambda numbers: Up(mean=(numbers, numbers[:2]), weight=(numbers.abs(), numbers[0].abs())),
    "a mask": lambda numbers: Up(mean=numbers, mask=numbers > -1.0),
    "a group": lambda numbers: Up(mean=numbers, group=(numbers[0] > 0).long()),
}
SENDERS = ("fedavg", "local", "scaffold", "fedfomo", "pgfed", "ifca")  # methods that send these


def sent(title: str, dtype: torch.dtype) -> list[Up]:
    """Return what the clients send.

    Args:
        title: a name out of UPLOADS.
        dtype: of the numbers.
    """
    draw = torch.Generator().manual_seed(3)
    return [UPLOADS[title](torch.randn(8, generator=draw, dtype=torch.float64).to(dtype)) for _ in range(CLIENTS)]


def keys() -> Tensor:
    """Return what each client's randomness is drawn from."""
    return derive(torch.tensor(5), torch.arange(CLIENTS))


def parts(up: Any) -> dict[str, Any]:
    """Return the tensors of an upload, or of rows of uploads, by their compartments; the weight where there is one."""
    named = {"mean": up.mean, "own": up.own, "weight": up.weight, "group": up.group, "mask": up.mask}
    return {name: part for name, part in named.items() if part is not None}


def travelling(wire: Transform, ups: list[Up]) -> list[Up]:
    """Return what the client half makes of uploads."""
    out = [wire.client(up, key) for up, key in zip(ups, keys(), strict=True)]
    for up in out:
        if not isinstance(up, Up):
            raise AssertionError(f"client must return an Up, not {kind_of(up)}")
    return out


def received(ups: list[Up]) -> Uploads:
    """Return uploads as rows, as they reach the server."""
    weight = stack([tree_map(torch.as_tensor, 1.0 if up.weight is None else up.weight) for up in ups])
    group, mask = (
        None if getattr(ups[0], part) is None else stack([getattr(up, part) for up in ups])
        for part in ("group", "mask")
    )
    own, mean = stack([up.own for up in ups]), stack([up.mean for up in ups])
    return Uploads(torch.arange(len(ups)), mean, own, weight, group, mask=mask)


def check_client(wire: Transform) -> None:
    """Check that the client half takes whatever methods send, and gives back uploads of one form."""
    for title in UPLOADS:
        ups = _trying(title, partial(travelling, wire, sent(title, torch.float64)))
        forms = [kinds(parts(up)) for up in ups]
        assert all(form == forms[0] for form in forms), f"{title}: clients' uploads have different forms"
        for before, after in zip(sent(title, torch.float64), ups, strict=True):
            weights = before.weight is None or after.weight is not None
            assert weights, f"{title}: client drops the weight that a method gave"
            for part in ("group", "mask"):
                same = (getattr(before, part) is None) == (getattr(after, part) is None)
                assert same, f"{title}: client drops the {part}, or makes one up"


def check_server(wire: Transform) -> None:
    """Check that the server half gives back the trees, shapes and kinds of numbers that the method sent."""
    for title in UPLOADS:
        for dtype in (torch.float32, torch.float64):
            ups = sent(title, dtype)
            rows = received(travelling(wire, ups))
            back = _trying(title, partial(wire.server, rows))
            assert isinstance(back, Uploads), f"{title}: server must return Uploads, not {kind_of(back)}"
            wrong = fault(kinds(parts(back), 1), kinds(parts(received(ups)), 1))
            word = str(dtype).removeprefix("torch.")
            assert not wrong, (
                f"{title} ({word}): what server gives back has another form than what the method sent "
                f"({wrong[0]}: {wrong[1]})"
            )
            assert torch.equal(back.ids, rows.ids), f"{title}: server changes the clients, or their number"


def check_batched(wire: Transform) -> None:
    """Check that the client half does under vmap, for many clients at once, what it does for each."""
    for title in UPLOADS:
        ups = [_tensors(up) for up in sent(title, torch.float64)]
        if not ups[0]:
            continue
        client = lambda tensors, key: _tensors(wire.client(Up(**tensors), key))
        batched = _trying(title, partial(vmap(client), stack(ups), keys()))
        alone = stack([_tensors(up) for up in travelling(wire, sent(title, torch.float64))])
        assert difference(batched, alone) < CLOSE, f"{title}: clients together get another result than each alone"


def _tensors(up: Up) -> dict[str, Any]:
    """Return an upload's compartments that hold something: vmap takes no others."""
    return {name: part for name, part in parts(up).items() if leaves(part)}


def check_draws(wire: Transform) -> None:
    """Check that a treatment draws from its key alone, and writes into nothing that it is given."""
    for title in UPLOADS:
        ups, before = sent(title, torch.float64), random_states()
        first = received(travelling(wire, ups))
        back = wire.server(first)
        touched = [name for name, state in random_states().items() if state != before[name]]
        assert not touched, f"{title}: it draws from the global random state of {touched[0]}, not from its key"
        unchanged = difference([parts(up) for up in ups], [parts(up) for up in sent(title, torch.float64)]) == 0
        assert unchanged, f"{title}: it writes into the upload that it is given"
        again = received(travelling(wire, ups))
        assert difference(parts(again), parts(first)) == 0, f"{title}: the same key gives another upload"
        assert difference(parts(wire.server(again)), parts(back)) == 0, f"{title}: the same rows give others"


def check_runs(wire: Transform, name: str) -> None:
    """Check that a method trains with its uploads treated, on every engine with the same result.

    Args:
        wire: the treatment.
        name: the method.
    """
    make, clients = maker(methods()[name]), toy_clients()
    expected = play(Sequential(job(make(epochs=1), clients, wire)))
    for engine, build in ENGINES.items():
        compare(play(build(make(epochs=1), clients, wire)), expected, engine)


def _trying(title: str, act: Any) -> Any:
    """Return what `act` gives; its errors name the upload that it failed on."""
    try:
        return act()
    except AssertionError:
        raise
    except Exception as error:
        error.args = (f"{title}: {error}", *error.args[1:])
        raise


CLIENT, SERVER = "client takes whatever a method sends", "server gives back the form that the method sent"
BATCHED, DRAWS = "clients together get what each gets alone", "the key alone decides, and nothing is changed in place"


def check_treatment(wire: Transform) -> Iterator[Verdict]:
    """Run every check on a treatment of uploads, one after another.

    Args:
        wire: the treatment.

    Yields:
        What each check found.
    """
    torch.set_num_threads(1)
    halves = [
        Check(CLIENT, check_client),
        Check(SERVER, check_server, (CLIENT,)),
        Check(DRAWS, check_draws, (CLIENT, SERVER)),
        Check(BATCHED, check_batched, (CLIENT, DRAWS)),
    ]
    needs = tuple(check.title for check in halves)
    runs = [Check(f"{name} agrees on every engine", partial(check_runs, name=name), needs) for name in SENDERS]
    yield from carried_out([*halves, *runs], wire)
