"""The command: its verbs, a file for each group of them. Wrong input ends in one sentence and exit code 2."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from perfed import __version__
from perfed.cli.compare import compare
from perfed.cli.help import Group, Verb
from perfed.cli.lists import list_
from perfed.cli.machine import bench, doctor
from perfed.cli.methods import check, new
from perfed.cli.models import models, personalise, predict
from perfed.cli.output import complain
from perfed.cli.partition import partitions
from perfed.cli.table import table
from perfed.cli.train import resume, run
from perfed.cli.tune import tune
from perfed.core.errors import ClientError, Problem, nearest

app = typer.Typer(
    name="perfed",
    cls=Group,
    help="Personalised federated learning: many clients train together, each ends with a model of its own.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
UsageMistake: Any = typer.BadParameter.__mro__[2]  # click's base of all usage errors, wherever typer has click from
VERBS = (run, resume, compare, table, tune, list_, models, predict, personalise, new, check, doctor, bench)
TAKES_SETTINGS = (run, compare, tune)
UNKNOWN = {"allow_extra_args": True, "ignore_unknown_options": True}  # --mu belongs to a method: looked up there

for verb in VERBS:
    app.command(verb.__name__.rstrip("_"), cls=Verb, context_settings=UNKNOWN if verb in TAKES_SETTINGS else {})(verb)
app.add_typer(partitions, name="partition")


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[  # noqa: ARG001 (`main` has looked at it)
        bool, typer.Option("--debug", help="With any command: show where an error came from.")
    ] = False,
) -> None:
    if version:
        sys.stdout.write(f"perfed {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def main() -> None:
    """Carry out what was typed and exit."""
    debug = "--debug" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        code = app(words, standalone_mode=False, prog_name="perfed")
    except Problem as problem:
        code = _refused(str(problem))
    except UsageMistake as mistake:
        text = mistake.format_message()
        verb = re.match(r"No such command '([^']*)'", text)
        code = _refused(f"there is no command '{verb[1]}'{nearest(verb[1], _verbs())}" if verb else text)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        code = 1
    except OSError as error:  # a full disk, a folder without permission, a name too long
        if debug:
            raise
        code = _refused(f"{error.strerror or error}" + (f": '{error.filename}'" if error.filename else ""))
    except Exception as error:
        if debug:
            raise
        kind = "" if isinstance(error, ClientError) else f"{type(error).__name__}: "
        complain(f"{kind}{error} (a bug? --debug shows where)")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _verbs() -> list[str]:
    commands = [*app.registered_commands, *app.registered_groups, *partitions.registered_commands]
    return [str(command.name or getattr(command.callback, "__name__", "")) for command in commands]


def _refused(text: str) -> int:
    """Say in one line what was wrong; return the exit code."""
    complain(text)
    return 2
