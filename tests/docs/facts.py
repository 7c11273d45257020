"""A section for each method, made from its file and from what `perfed list methods --json` says: docs/catalogue.md."""

import contextlib
import functools
import io
import json

import pytest

from perfed.cli import main
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.report.tables import markdown
from perfed.training.catalog import Entry, common, methods

DIGITS = (1, 8, 8), 10  # what a sample is like, and classes
NETWORKS = {"": {}, "--model resnet --norm batch": {"name": "resnet", "norm": "batch"}}  # that one of them is for all
EVALUATED = {
    "own": "a model that the client trained",
    "assembled": "a model put together of shared and own parts",
    "adapted": "the shared model after some steps of the client",
    "global": "one model for all",
}
SUMS = {
    "yes": "sums over clients are enough for the server",
    "per group": "sums over each group of clients are enough for the server",
    "no": "the server reads clients one by one",
    "nothing is sent": "nothing is sent",
}
SETTINGS = ("setting", "default", "allowed", "meaning")


@functools.cache
def listed() -> dict[str, dict]:
    """What `perfed list methods --json` says of each method."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr("sys.argv", ["perfed", "list", "methods", "--json"])
        with pytest.raises(SystemExit):
            main()
    return {about["name"]: about for about in json.loads(out.getvalue())["methods"]}


def settings(fields: list[dict]) -> str:
    told = lambda value: str(value).lower() if isinstance(value, bool) else f"{value}"
    rows = [(f"`--{f['name'].replace('_', '-')}`", told(f["default"]), f["range"], f["meaning"]) for f in fields]
    return markdown(SETTINGS, rows)


def takes(kind: type[Method], network: dict[str, str]) -> bool:
    """Whether a method accepts a network for digits."""
    try:
        kind(Model(make_network(ModelConfig(**network), *DIGITS)))
    except Problem:
        return False
    return True


def command(name: str, kind: type[Method]) -> str:
    """The line that runs a method, with a network that it accepts."""
    suited = next(words for words, network in NETWORKS.items() if takes(kind, network))
    return f"`{f'perfed run {name} --data digits {suited}'.strip()}`"


def samples(kind: type[Method]) -> str:
    if not kind.public:
        return "clients' own"
    sent = ", which each client is sent when it first takes part" if kind.sends_public else ", at the server"
    return f"clients' own, and {kind.public} public ones{sent} (`--public`)"


def section(entry: Entry) -> str:
    about, kind = listed()[entry.name], entry.load()
    every_batch = kind.batch_traffic is not Method.batch_traffic
    travels = f"{about['down']:g} P down, {about['up']:g} P up; {SUMS[about['secure_sums']]}"
    rows = [
        ("reference", about["paper"] or "none: what every method is compared with"),
        ("place", about["category"]),
        ("evaluated", f"{about['evaluates']}: {EVALUATED[about['evaluates']]}"),
        ("travels", travels + "; besides, numbers of every batch" * every_batch),
        ("samples", samples(kind)),
        ("networks", "may differ from client to client (`--networks`)" if kind.own_networks else "one for all clients"),
        ("cohort at once", "yes" if about["vectorised"] else "no, one client after another: its file says why"),
        ("run", command(entry.name, kind)),
    ]
    usual = {name: field.default for name, field in common().items()}
    own = [field for field in about["hyperparameters"] if usual.get(field["name"], ...) != field["default"]]
    head = f"## {entry.name}\n\n**{entry.title}**: {entry.summary} ([file](../src/perfed/methods/{entry.name}.py)).\n\n"
    return head + markdown(("", ""), rows) + ("\n" + settings(own) if own else "")


def catalogue() -> str:
    """Make the settings that all methods have, and a section for each method."""
    first = next(iter(listed().values()))["hyperparameters"]
    every = [field | {"default": common()[field["name"]].default} for field in first if field["name"] in common()]
    return "\n".join([settings(every), *map(section, methods().values())])
