"""Options that several verbs share, and the configuration that words and options make."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from perfed import data, models
from perfed.core.errors import Problem, nearest
from perfed.training import catalog
from perfed.training.config import Config, assign, flags, from_dict, place_flags, read_toml

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, last, on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Out = Annotated[Path | None, typer.Option(help="Folder to make for this run (default: a new one in ./runs).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override one setting: section.key=value.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
MethodOfRun = Annotated[str | None, typer.Option("--method", help="Method of the run (default: the last one).")]
Methods = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[METHOD]...",
        help="Names or files of methods, and settings of theirs: pgfed --mu 0.05. With --help, METHOD shows them.",
    ),
]


PANELS = {
    "data": "Data",
    "model": "Network",
    "run": "Run",
    "system": "System",
    "train": "Training",
}  # groups of settings, in a help
# Parts of sections that would not fit a page.
PARTS = {
    "Partition": "partition clients alpha cap classes_per_client share_low share_high power_law log_sigma min_samples "
    "partition_seed bins split test val stratify rotate noise relabel relabel_by relabel_shift "
    "relabel_groups team_order",
    "Optimisation": "augment class_weights lr_schedule lr_step lr_decay lr_end server_optimizer server_rate "
    "server_momentum server_beta2 server_tau",
    "System": "dropout stragglers straggler_work",
    "Engine": "engine workers block compile fast tf32 device precision state_memory",
}
PANEL_OF = {name: panel for panel, names in PARTS.items() for name in names.split()}


class Typed(NamedTuple):
    """The part of a command line that makes a configuration.

    Attributes:
        words: names of methods, and options that belong to methods.
        file: the TOML file.
        sets: what follows each --set.
        settings: the options that belong to every run, without those that were not typed.
    """

    words: list[str]
    file: Path | None
    sets: list[str]
    settings: dict[str, Any]

    def config(self, apart: str = "") -> Config:
        """Make the configuration: the file, then --set, then options.

        Args:
            apart: a table of the file that is no part of a configuration.

        Returns:
            The configuration, checked as far as that goes without torch.
        """
        names, options = split_words(self.words)
        raw = read_toml(self.file) if self.file else {}
        raw.pop(apart, None)
        for text in self.sets:
            assign(raw, text)
        config = from_dict(place_flags({**self.settings, **options}, names, raw))
        data.check(config.data)
        models.check_names(config.model)
        return config


def with_settings(verb: Callable[..., None], only_data: bool = False) -> Callable[..., None]:
    """Give a verb the options that make a configuration; what was typed of them becomes its argument `typed`.

    They are METHOD..., --config, --set, and an option for every field of the configuration and every common
    hyper-parameter; with `only_data` there are no methods, and settings of the data alone.
    """
    sources = ({} if only_data else {"methods": Methods}) | {"config": ConfigFile, "sets": Sets}
    settings = _settings(only_data)

    def wrapper(**values: Any) -> None:
        words, file, sets = (values.pop(name, None) for name in ("methods", "config", "sets"))
        chosen = {name: values.pop(name) for name in settings}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        verb(typed=Typed(words or [], file, sets or [], chosen), **values)

    own = [own for name, own in inspect.signature(verb, eval_str=True).parameters.items() if name != "typed"]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters = [*_parameters(sources), *own, *_parameters(settings)]
    wrapper.__signature__ = inspect.Signature(parameters)
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__doc__, wrapper.__name__ = verb.__doc__, verb.__name__
    return wrapper


def _parameters(hints: dict[str, Any]) -> list[inspect.Parameter]:
    """Return optional parameters with these type hints."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]


def _settings(only_data: bool) -> dict[str, Any]:
    """Return typer's description of every option that belongs to every run."""
    options = {}
    for name, (section, field) in flags().items():
        if not only_data or section == "data" or name == "seed":
            options[name] = _option(
                str(field.type), field.default, field.metadata["meaning"], PANEL_OF.get(name, PANELS[section])
            )
    if not only_data:
        for name, field in catalog.common().items():
            options[name] = _option(str(field.kind), field.default, field.meaning, PANELS["train"])
    return options


def _option(kind: str, default: Any, meaning: str, panel: str) -> Any:
    """Return typer's description of an option; its value stays text until the configuration is made."""
    is_bool, text = "bool" in kind, described(kind, default, meaning)
    metavar = None if is_bool else "N" if "int" in kind else "X" if "float" in kind else "TEXT"
    return Annotated[(bool if is_bool else str) | None, typer.Option(help=text, metavar=metavar, rich_help_panel=panel)]


def described(kind: str, default: Any, meaning: str) -> str:
    """Return what a setting means, what may be chosen, and its default.

    Args:
        kind: its type as it is written.
        default: its default.
        meaning: what it means.
    """
    choices = re.findall(r"""['"]([^'"]+)['"]""", kind) if "Literal" in kind else []
    notes = [" | ".join(choices)] if choices else []
    notes += [f"default: {str(default).lower()}"] if default not in ("", None) and "default" not in meaning else []
    return f"{meaning} [{'; '.join(notes)}]" if notes else meaning


def split_words(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Tell the names of methods from the options among them that click does not know."""
    names: list[str] = []
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            names += split_commas([word])
            continue
        name, equals, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if not equals:
            value = next(rest, "")
            if not value or value.startswith("--"):
                known = {*flags(), *catalog.common()}
                known |= {field for entry in catalog.methods().values() for field in entry.fields}
                if key not in known:
                    raise Problem(f"there is no option '--{name}'{nearest(key, known)}")
                raise Problem(f"option '--{name}' needs a value")
        options[key] = value
    return names, options


def split_commas(words: list[str] | None) -> list[str]:
    """Return `a,b` and `c` as a, b, c."""
    return [part for word in words or [] for part in word.split(",") if part]
