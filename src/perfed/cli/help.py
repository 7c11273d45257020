"""The text of --help: options in groups, each of which fits a page, and those of the methods that are named."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from perfed.cli.options import described, split_commas
from perfed.core.errors import Problem
from perfed.training import catalog

WIDEST = 100  # characters of a line
DEBUG = ("--debug", "Show where an error came from.")


class Verb(TyperCommand):
    """A command whose help has a section for each group of options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; its words are kept for the help, which is shown before they are looked at.

        Args:
            ctx: the command's context.
            args: the words.

        Returns:
            What is left of them.
        """
        ctx.meta["perfed.words"] = list(args)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help.

        Args:
            ctx: the command's context.
        """
        ctx.max_content_width = WIDEST
        return super().get_help(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all options, those of a group below its name.

        Args:
            ctx: the command's context.
            formatter: where they are written.
        """
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                name, text = record
                panel = getattr(parameter, "rich_help_panel", None) or usual
                sections.setdefault(panel, []).append((name, text.replace("\\[", "[")))  # typer escapes for rich
        sections["Options"].insert(-1, DEBUG)
        words = ctx.meta.get("perfed.words", []) if "Training" in sections else []
        first = {title: sections.pop(title) for title in ("Arguments", "Options") if title in sections}
        for title, records in {**first, **_of_methods(words), **sections}.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(TyperGroup):
    """The command itself, whose help lists its verbs."""

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help.

        Args:
            ctx: the command's context.
        """
        ctx.max_content_width = WIDEST
        return super().get_help(ctx)


def _of_methods(words: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return a section for each method among these words: the settings that not every method has."""
    sections = {}
    for word in split_commas([word for word in words if not word.startswith("-")]):
        try:
            entry = catalog.find(word)
        except (Problem, OSError):  # the value of an option, or a method that does not exist
            continue
        own = [field for name, field in entry.fields.items() if name not in catalog.common()]
        records = [(_option_of(field), _meaning_of(field)) for field in own]
        sections[f"Settings of {entry.name} alone"] = records or [("none", "All that it can be told is below.")]
    return sections


def _option_of(field: catalog.Field) -> str:
    metavar = {"int": "N", "float": "X", "bool": "true|false"}.get(field.type, "TEXT")
    return f"--{field.name.replace('_', '-')} {metavar}"


def _meaning_of(field: catalog.Field) -> str:
    return described(str(field.kind), field.default, field.meaning)
