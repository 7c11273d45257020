"""The error for what a user did wrong, told in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class Problem(Exception):
    """Report bad input in one sentence: what, where, what is allowed. The command prints it and exits with 2."""


class SettingsProblem(Problem):
    """Report settings of a method that do not go together, or not with the data and the network: others may."""


class ClientError(RuntimeError):
    """What a client failed with, as a sentence; its cause or, from another process, a note has the traceback."""


def refuse_file(name: str, where: str) -> None:
    """Refuse a path where the name of one of perfed's own members is wanted.

    Args:
        name: what was typed.
        where: the setting.
    """
    if name.endswith(".py") or "/" in name:
        raise Problem(f"{where}: '{name}' is a file, and only methods and networks may be files of your own")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' where something close to `word` is known, else what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""


def few(words: Sequence[str], most: int = 5) -> str:
    """Join the first words of a list for a sentence, and count the others.

    >>> few(["oslo", "lima", "pune"], most=2)
    'oslo, lima and 1 more'
    """
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
