"""What a command prints, and where: words for people, or a JSON object for programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from perfed.core.words import visible
from perfed.report.terminal import Terminal


def console_for(json_wanted: bool, quiet: bool = False) -> Console:
    """Make the place for words for people: not where JSON goes."""
    console = Terminal(stderr=json_wanted, quiet=quiet, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no edge
    return console


def print_json(value: Any) -> None:
    """Print a JSON object on a line of its own."""
    sys.stdout.write(json.dumps(value) + "\n")


def answer(json_wanted: bool, value: Any, lines: Iterable[str]) -> None:
    """Print a JSON object, or lines for people."""
    if json_wanted:
        print_json(value)
        return
    console = console_for(json_wanted)
    for line in lines:
        console.print(line)


def complain(text: str) -> None:
    """Say on standard error, in one line, what was wrong."""
    sys.stderr.write(f"perfed: {visible(' '.join(text.split()))}\n")


@contextmanager
def interruptible(resume: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """End with the command that continues the run on Ctrl-C and SIGTERM.

    Args:
        resume: returns the folder of the run; None where the same command continues it.
    """
    code, owner = 130, os.getpid()

    def stop(*_: Any) -> None:
        nonlocal code
        if os.getpid() == owner:  # forked workers inherit this; the process that started them decides
            code = 143
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        folder = resume()
        command = visible(f"; continue with: perfed resume {shlex.quote(str(folder))}") if folder else ""
        sys.stderr.write(f"\nstopped{command}\n")
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse_diverged(diverged: dict[str, str]) -> None:
    """End with exit code 1 and one sentence where training diverged; what came to an end is kept and shown."""
    if diverged:
        complain("; ".join(f"{method}: {why}" for method, why in diverged.items()))
        raise typer.Exit(1)


def typed_command() -> str:
    """Return what was typed, without this machine's folders and ways of printing, which are nobody else's business."""
    words = " ".join(["perfed", *sys.argv[1:]])
    return re.sub(r" (-q|--(debug|json|quiet|only-report|(data-dir|out|pack)[ =]\S+))(?= |$)", "", words)
