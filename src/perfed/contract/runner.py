"""Run the contract on a method file, check after check: `perfed check FILE`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from perfed.contract import checks
from perfed.contract.checks import ENGINES
from perfed.contract.toy import networks
from perfed.core.errors import Problem
from perfed.training.catalog import Entry

CHECKS = {
    "compiled steps equal plain ones": checks.check_compiled,
    "several runs in one batch equal each alone": checks.check_together,
    "BatchNorm statistics move": checks.check_statistics,
    "nothing is changed in place": checks.check_pure,
    "the same seed gives the same result": checks.check_repeatable,
    "state survives saving and loading": checks.check_saved,
    "states keep their form": checks.check_stable,
    "a global model is the same for all": checks.check_global,
    "every hyper-parameter matters": checks.check_settings,
    "it learns where clients disagree": checks.check_learns,
}


def check_method(entry: Entry) -> Iterator[tuple[str, str | None]]:
    """Run every check on a method, one after another.

    Args:
        entry: the method's catalog entry.

    Yields:
        The title of a check, and a sentence that says what is wrong, or None if it passed.
    """
    torch.set_num_threads(1)
    tasks = [
        (f"{engine} equals sequential, {network} network", partial(checks.check_engines, entry, network, engine))
        for engine in ENGINES
        for network in networks(entry)
    ]
    tasks += [(title, partial(check, entry)) for title, check in CHECKS.items()]
    for title, check in tasks:
        try:
            check()
            yield title, None
        except Problem as problem:
            yield title, str(problem)
        except Exception as error:
            text = " ".join(str(error).split())
            yield title, text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[:300]}"
