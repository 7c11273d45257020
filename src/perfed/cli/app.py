"""The command: thin, one function per verb. Wrong input ends in one sentence and exit code 2."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from perfed import __version__
from perfed.core.errors import Problem, nearest
from perfed.training import catalog
from perfed.training.config import Config, assign, flags, from_dict, place_flags, read_toml, refuse_taken

app = typer.Typer(
    name="perfed",
    help="Personalised federated learning: many clients train together, each ends with a model of its own.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
partitions = typer.Typer(help="How a data set becomes clients.", rich_markup_mode=None)
app.add_typer(partitions, name="partition")
UsageMistake: Any = typer.BadParameter.__mro__[2]  # click's base of all usage errors, wherever typer has click from

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, last, on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Out = Annotated[Path | None, typer.Option(help="Folder to make for this run (default: a new one in ./runs).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override one setting: section.key=value.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Methods = Annotated[
    list[str] | None,
    typer.Argument(metavar="[METHOD]...", help="Names or files of methods, and settings of theirs: pgfed --mu 0.05."),
]
_UNKNOWN = {"allow_extra_args": True, "ignore_unknown_options": True}  # --mu belongs to a method: looked up there


def _with_settings(verb: Callable[..., None], only_data: bool = False) -> Callable[..., None]:
    """Give a verb one option for every field of the configuration and every common hyper-parameter, or for the data."""
    wanted = {name: one for name, (kind, one) in flags().items() if not only_data or kind == "data" or name == "seed"}
    fields = {name: (one.type, one.default, one.metadata["meaning"]) for name, one in wanted.items()}
    if not only_data:
        fields |= {name: (f.type, f.default, f.meaning) for name, f in catalog.common().items()}

    def wrapper(**given: Any) -> None:
        settings = {name: given.pop(name) for name in fields}
        verb(settings={name: value for name, value in settings.items() if value is not None}, **given)

    own = [p for name, p in inspect.signature(verb, eval_str=True).parameters.items() if name != "settings"]
    options = []
    for name, (kind, default, meaning) in fields.items():
        shown = "" if default in ("", None) or "default" in meaning else f" [default: {str(default).lower()}]"
        hint = Annotated[(bool if str(kind) == "bool" else str) | None, typer.Option(help=meaning + shown)]
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapper.__signature__ = inspect.Signature([*own, *options])
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    wrapper.__doc__, wrapper.__name__ = verb.__doc__, verb.__name__
    return wrapper


def _split(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Method names, and the options among them that click does not know."""
    names: list[str] = []
    extra: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            names += [name for name in word.split(",") if name]
            continue
        name, equals, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if not equals:
            value = next(rest, "")
            if not value or value.startswith("--"):
                known = {*flags(), *catalog.common()} | {k for e in catalog.methods().values() for k in e.fields}
                if key not in known:
                    raise Problem(f"there is no option '--{name}'{nearest(key, known - set(catalog.RUN_SETS))}")
                raise Problem(f"option '--{name}' needs a value")
        extra[key] = value
    return names, extra


def _configure(
    words: list[str] | None, config: Path | None, sets: list[str] | None, settings: dict[str, Any], apart: str = ""
) -> Config:
    """File (without the table `apart`), then --set, then options; checked as far as that goes without torch."""
    names, extra = _split(words or [])
    raw = read_toml(config) if config else {}
    raw.pop(apart, None)
    for text in sets or []:
        assign(raw, text)
    made = from_dict(place_flags({**settings, **extra}, names, raw))
    from perfed import data as sources
    from perfed import models

    sources.check(made.data)
    models.check_name(made.model.name)
    return made


def _console(json_wanted: bool, quiet: bool = False) -> Console:
    """Where words for people go: not where JSON goes."""
    console = Console(stderr=json_wanted, quiet=quiet, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no edge
    return console


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


@contextmanager
def _interruptible(resume: Callable[[], Path | None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end with the command that continues the run."""
    code, owner = 130, os.getpid()

    def stop(*_: Any) -> None:
        nonlocal code
        if os.getpid() == owner:  # forked workers inherit this; the one that started them decides
            code = 143
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        folder = resume()
        sys.stderr.write("\nstopped" + (f"; continue with: perfed resume {folder}\n" if folder else "\n"))
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _ending(console: Console, run: Any, json_wanted: bool) -> None:
    """The table, and where to find things."""
    from perfed.report.tables import HEADINGS, ON_TERMINAL, lines, remarks, rich_table

    one = run.clients()[0]
    console.print()
    console.print(rich_table(HEADINGS, lines(run), ON_TERMINAL), soft_wrap=False)
    for line in remarks(run.summary()):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"\nreport   {run.path / 'report'}")
    many = len(run.about["clients"])
    if not one.path.exists():
        console.print("models   none written (--save-models)")
    elif one.path.parent.name != one.about["folder"]:
        console.print(f"models   {one.path}   (one for all {many} clients)")
    else:
        console.print(f"models   {one.path.parent.parent}/<client>/model.safetensors   ({many} clients)")
    load = f"perfed.load('{run.path}').client('{one.about['folder']}').model()"
    if one.path.exists():
        console.print(f'load     python -c "import perfed; print({load})"')
    if json_wanted:
        _print_json({"run": str(run.path), "methods": run.summary()})
    _refuse_diverged(run.diverged)


def _refuse_diverged(diverged: dict[str, str]) -> None:
    """End with exit code 1 and one sentence where training diverged; what came to an end is kept and shown."""
    if diverged:
        sys.stderr.write("perfed: " + "; ".join(f"{method}: {why}" for method, why in diverged.items()) + "\n")
        raise typer.Exit(1)


@app.command(context_settings=_UNKNOWN)
@_with_settings
def run(
    methods: Methods = None,
    config: ConfigFile = None,
    sets: Sets = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train methods beside Local and compare them. Without arguments: digits, 20 clients, Local, FedAvg, PGFed."""
    made, console = _configure(methods, config, sets, settings), _console(json, quiet)
    refuse_taken(out)
    from perfed import api
    from perfed.training.experiment import create, prepare
    from perfed.training.train import train

    experiment = prepare(made)
    folder = create(experiment, out)
    with _interruptible(lambda: folder):
        _heading(console, folder, experiment)
        train([experiment], [folder], console)
        _ending(_console(json), api.finish(folder), json)


def _heading(console: Console, folder: Path, experiment: Any) -> None:
    config, clients = experiment.config, experiment.clients
    held = [len(set(y.tolist())) for y in clients.train.y.cpu().split(list(clients.train.size))]
    how = config.data.partition + (f" {config.data.alpha:g}" if config.data.partition == "dirichlet" else "")
    how = " + ".join([how, *clients.partition["skews"]])
    sizes = clients.train.size
    where = f"{experiment.engine} on {experiment.device}"
    console.print(f"perfed {__version__}  {folder}  seed {config.run.seed}  {where}")
    console.print(
        f"data     {config.data.name}  {len(clients)} clients  {how}  "
        f"classes per client {min(held)}-{max(held)}  training samples {min(sizes)}-{max(sizes)}"
    )


@app.command()
def resume(run: RunFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Continue a run (or a comparison) that was stopped; it ends as if it had never been."""
    from perfed.studies.compare import is_comparison

    console = _console(json, quiet)
    with _interruptible(lambda: run):
        if is_comparison(run):
            _compared(run, console, json)
            return
        from perfed import api

        _ending(_console(json), api.resume(run, console), json)


@app.command(context_settings=_UNKNOWN)
@_with_settings
def compare(
    methods: Methods = None,
    config: ConfigFile = None,
    sets: Sets = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted up from --seed.", min=1, max=1000)] = 3,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also spread, fairness, convergence and cost.")] = False,
    target: Annotated[
        float | None,
        typer.Option(help="--metrics, and rounds, local epochs and bytes until this mean test accuracy.", min=0, max=1),
    ] = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Several methods under several seeds: mean and deviation, gain over Local with a Wilcoxon test."""
    made, console = _configure(methods, config, sets, settings), _console(json, quiet)
    refuse_taken(out)
    if target is not None and math.isnan(target):
        raise Problem("--target must be a number from 0 to 1, not nan")
    from perfed.studies.compare import create

    folder = create(made, seeds, out, metrics, target)
    with _interruptible(lambda: folder):
        _compared(folder, console, json)


def _compared(folder: Path, console: Console, json_wanted: bool) -> None:
    from perfed.report.tables import remarks, rich_table
    from perfed.studies.compare import HEADINGS, PLAN, carry_out, lines
    from perfed.training import files

    result = carry_out(folder, console)
    talk = _console(json_wanted)
    talk.print()
    talk.print(rich_table(HEADINGS, lines(result)), soft_wrap=False)
    for line in remarks(result["methods"]):
        talk.print(line, highlight=False, soft_wrap=True)
    asked = files.read_json(folder / PLAN)
    target = asked.get("target")
    if asked.get("metrics") or target is not None:
        from perfed.studies import measures
        from perfed.training.results import Run

        result["metrics"] = measures.of_runs([Run(place) for place in result["methods"][0]["runs"]], target)
        for one in measures.as_tables(result["metrics"], target):
            talk.print()
            talk.print(rich_table(*one), soft_wrap=False)
    talk.print(f"\nreport   {folder / 'compare.md'}")
    if json_wanted:
        _print_json(result)
    _refuse_diverged({method["method"]: method["diverged"] for method in result["methods"] if "diverged" in method})


@app.command()
def table(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A table (`perfed list tables`), or a TOML file.")],
    column: Annotated[list[str] | None, typer.Option(help="Only these columns: a,b.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Only these rows: a,b.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds (default: the paper's).", min=1, max=1000)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A reduced version in a few minutes; labelled REDUCED.")
    ] = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Run nothing; show what is there.")] = False,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and results; what is there is not run again.")] = Path(
        "runs/tables"
    ),
    pack: Annotated[
        Path | None, typer.Option(help="Also write the runs behind it, without data and models, to this .tar.xz file.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with data files.")] = None,
    engine: Annotated[str | None, typer.Option(help="How a round is computed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile", help="Compile the steps of 'vectorised'.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A published table again: run what is missing, then the paper's numbers and these side by side."""
    from perfed.studies.papers import protocol

    made = protocol.reduced(protocol.find(name), sets or [], quick)
    made = protocol.chosen(made, _listed(column), _listed(methods), seeds)
    for place in made.columns:  # what is wrong is found before anything is run
        for row in made.rows:
            made.config(place, row, 0)
    from perfed.report.table_text import cells, column_title, headings, orders
    from perfed.report.tables import rich_table
    from perfed.studies.papers import pack as packing
    from perfed.studies.papers.make import make
    from perfed.studies.papers.tuned import chosen_on

    console = _console(json, quiet)
    asked = {"engine": engine, "device": device, "compile": compile, "data_dir": data_dir}
    how = {key: value for key, value in asked.items() if value is not None}
    if pack is not None:
        packing.check_path(pack)
    with _interruptible(lambda: None):
        lines, written = make(made, out, console, only_report=only_report, command=_command(), how=how)
    if pack is not None:
        packing.pack(made, out, pack)
        written.append(pack)
    talk = _console(json)
    if not talk.is_terminal:
        talk.width = 200
    talk.print(made.title + (f"\n{made.label}" if made.label else ""), markup=False)
    for place in made.columns:
        talk.print(f"\n{column_title(made, lines, place)}", markup=False)
        talk.print(rich_table(headings(made), cells(made, lines, place)), soft_wrap=False)
    for line in ["", *orders(made, lines), *chosen_on(made), *(f"written  {path}" for path in written)]:
        talk.print(line, markup=False)
    if json:
        _print_json({"table": made.name, "label": made.label, "lines": lines, "files": list(map(str, written))})


@app.command(context_settings=_UNKNOWN)
@_with_settings
def tune(
    methods: Methods = None,
    grid: Annotated[list[str] | None, typer.Option(help="Values to try: lr=0.1,0.01; once for each setting.")] = None,
    table: Annotated[str | None, typer.Option(help="Take settings and grid from this table (METHOD is a row).")] = None,
    column: Annotated[str | None, typer.Option(help="The column of that table.")] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Rows of that table, one after another: a,b.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="That table's reduced version.")] = False,
    seeds: Annotated[int, typer.Option(help="Seeds of every trial.", min=1, max=1000)] = 1,
    trials: Annotated[int | None, typer.Option(help="Search with Optuna, so many trials.", min=1)] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Folder of the trials; finished ones are not run again.")] = Path(
        "runs/tune"
    ),
    json: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Choose a method's settings on validation samples: every combination of --grid, or of a table's own grid."""
    names, extra = _split(methods or [])
    names += _listed(rows)
    if not names or (rows and table is None):
        raise Problem("name the method to tune (perfed tune pgfed --grid lr=0.1,0.01), or --rows of a --table")
    if table is None:
        made = _configure(methods, config, sets, settings, apart="grid")
        if len(made.methods) != 1:
            raise Problem(f"perfed tune takes one method, not {', '.join(made.methods)}")
        from perfed.studies import tune as tuning

        values = (read_toml(config).get("grid", {}) if config else {}) | tuning.read_grid(grid or [])
        tasks, how = [tuning.for_run(made, values, out)], {}
    else:
        how = {key: settings.pop(key) for key in ("data_dir", "engine", "device") if key in settings}
        rounds = settings.pop("rounds", None)
        if column is None:
            raise Problem("--table needs --column: settings are chosen column by column")
        if settings or config or extra:
            raise Problem("with --table the settings are the table's: change them with --set section.key=value")
        from perfed.studies import tune as tuning
        from perfed.studies.papers import protocol

        made = protocol.reduced(protocol.find(table), sets or [], quick)
        shorter = [] if rounds is None else [f"run.rounds={rounds}"]
        trial = protocol.reduced(protocol.find(table), [*(sets or []), *shorter], quick)
        tasks = [tuning.for_table(made, trial, column, row, grid or [], out) for row in dict.fromkeys(names)]
    console, talk, found, problems = _console(json, quiet), _console(json), {}, []
    with _interruptible(lambda: None):
        for task in tasks:
            try:
                one = tuning.tune(task, console, seeds=seeds, trials=trials, how=how, command=_command())
            except Problem as problem:  # what is wrong with one row is said after the others
                problems.append(problem)
                continue
            found[task.name] = one
            _tuned(talk, one)
    if problems:
        raise problems[0]
    if json:
        _print_json(found[tasks[0].name] if len(tasks) == 1 else {"rows": found})


def _tuned(talk: Console, found: dict[str, Any]) -> None:
    """What was tried, best first, and how to use it."""
    for one in sorted(found["tried"], key=lambda one: -(one["validation"] or 0)):
        score = "failed" if one["validation"] is None else f"{one['validation']:.4f}"
        talk.print(f"{score}  " + "  ".join(f"{k} {v}" for k, v in one["settings"].items()), markup=False)
    best = found["best"]["validation"]
    talk.print(f"\nbest validation accuracy {best:.4f} of {len(found['tried'])} tried", markup=False)
    talk.print(f"use      {found['use']}\nwritten  {'  '.join(found['files'])}\n", markup=False)


def _listed(words: list[str] | None) -> list[str]:
    """`a,b` and `c` as a, b, c."""
    return [one for word in words or [] for one in word.split(",") if one]


def _command() -> str:
    """What was typed; where data and runs are on this machine is nobody else's business."""
    told = " ".join(["perfed", *sys.argv[1:]])
    return re.sub(r" (-q|--(debug|json|quiet|only-report|(data-dir|out|pack)[ =]\S+))(?= |$)", "", told)


@partitions.callback(invoke_without_command=True)
def _partitions(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@partitions.command()
@partial(_with_settings, only_data=True)
def show(
    config: ConfigFile = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Write this PNG; an SVG and a CSV beside it.")] = None,
    json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Share a data set out and show who got what: sizes, labels, how uneven the clients are."""
    made = _configure(None, config, sets, settings)
    if out is not None and out.suffix.lower() != ".png":
        raise Problem(f"--out must end in .png, not '{out}'")
    if out is not None and not out.parent.is_dir():
        raise Problem(f"--out: there is no folder '{out.parent}'")
    from perfed.report import partition as report
    from perfed.report.tables import rich_table
    from perfed.training import files
    from perfed.training.experiment import load_clients

    clients, console = load_clients(made.data, made.run.seed), _console(json)
    console.print(report.heading(clients, made.data), markup=False)
    console.print()
    console.print(rich_table(*report.lines(clients)), soft_wrap=False)
    console.print()
    for line in report.summary(clients):
        console.print(line, markup=False)
    written = []
    if out is not None:
        contents = report.pictures(clients, made.data) | {"csv": report.counts_csv(clients)}
        for kind, content in contents.items():
            written.append(str(out.with_suffix(f".{kind}") if kind != "png" else out))
            files.write(Path(written[-1]), content)
        console.print(f"\nwritten  {'  '.join(written)}", markup=False)
    if json:
        _print_json(report.as_dict(clients) | {"data": made.data.name, "files": written})


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(help="methods, datasets, partitions, models, engines or tables")] = "methods",
    json: Json = False,
) -> None:
    """What there is to choose from."""
    from perfed import engines, models
    from perfed.data.catalog import datasets, partitions
    from perfed.studies.papers import protocol

    tables = {
        "methods": {name: entry.summary for name, entry in catalog.methods().items()},
        "datasets": datasets(),
        "partitions": partitions(),
        "models": models.networks(),
        "engines": engines.engines(),
        "tables": {name: protocol.find(name).title for name in protocol.names()},
    }
    if kind not in tables:
        raise Problem(f"there is no list of '{kind}'{nearest(kind, tables)}")
    if json:
        _print_json({kind: [_method(e) for e in catalog.methods().values()] if kind == "methods" else tables[kind]})
        return
    for name, meaning in tables[kind].items():
        _console(False).print(f"{name:<14} {meaning}", markup=False)


def _method(entry: catalog.Entry) -> dict[str, Any]:
    from perfed.report.methods import measured

    known = [f for name, f in entry.fields.items() if name not in catalog.RUN_SETS]
    fields = [
        {"name": f.name, "type": f.type, "default": f.default, "range": f.range, "meaning": f.meaning} for f in known
    ]
    about = {"name": entry.name, "title": entry.title, "summary": entry.summary, "paper": entry.paper}
    about |= {"category": entry.category, "evaluates": entry.evaluates, "vectorised": entry.vectorised}
    return {**about, **measured(entry), "hyperparameters": fields}


Method = Annotated[str | None, typer.Option(help="Method of the run (default: the last one).")]


@app.command()
def models(run: RunFolder, method: Method = None, json: Json = False) -> None:
    """Every client's model: its accuracy and its file."""
    from perfed.api import load

    opened = load(run)
    clients = opened.clients(method)
    if json:
        found = [{"client": c.name, "accuracy": c.accuracy, "path": str(c.path)} for c in clients]
        _print_json({"run": str(run), "method": clients[0].method, "models": found})
        return
    from perfed.report.tables import score

    for c in clients:
        _console(False).print(f"{c.name:<20} {score(c.accuracy):>6}   {c.path}", markup=False)


@app.command()
def predict(
    run: RunFolder,
    client: Annotated[str, typer.Option(help="The client's name.")],
    input: Annotated[Path, typer.Option(help=".npz with x, .npy, or .csv with one sample per line.")],
    method: Method = None,
    json: Json = False,
) -> None:
    """Classes that a client's model predicts for the samples of a file."""
    from perfed.api import load
    from perfed.data.samples import read_samples

    one = load(run).client(client, method)
    predicted = one.predict(read_samples(input, tuple(one.run.about["shape"]))).tolist()
    if json:
        _print_json({"client": one.name, "method": one.method, "predictions": predicted})
        return
    for label in predicted:
        _console(False).print(label)


@app.command()
def personalise(
    run: RunFolder,
    data: Annotated[str, typer.Option(help="Data set of the new clients; 'folder' for your own files.")] = "folder",
    data_dir: Annotated[str | None, typer.Option(help="Folder (or table) with the new clients' files.")] = None,
    method: Method = None,
    rounds: Annotated[int, typer.Option(help="Local rounds; nothing is sent.", min=0, max=10_000)] = 1,
    fine_tune: Annotated[int, typer.Option(help="Epochs of fine-tuning after them.", min=0, max=10_000)] = 0,
    sets: Sets = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Give clients that never took part a model, from a finished run and their own data."""
    raw: dict[str, Any] = {"data": {"name": data, **({} if data_dir is None else {"dir": data_dir})}}
    for text in sets or []:
        assign(raw, text)
    if set(raw) != {"data"}:
        raise Problem("a newcomer's method has the run's settings: --set takes data.key=value here")
    made = from_dict(raw)
    from perfed import data as sources
    from perfed.api import load

    sources.check(made.data)
    opened = load(run)
    from perfed.training.newcomers import personalise as welcome

    found = welcome(opened, method or opened.main, made.data, rounds, fine_tune, out)
    if json:
        _print_json(found)
        return
    from perfed.report.tables import score

    for one in found["clients"]:
        _console(False).print(f"{one['client']:<20} {score(one['personal']['test']['accuracy']):>6}   {one['path']}")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The method's name; writes NAME.py here.", show_default=False)],
    json: Json = False,
) -> None:
    """Write a method file to edit."""
    from perfed.contract.template import write_method

    path = write_method(name)
    if json:
        _print_json({"file": str(path)})
    else:
        _console(False).print(f"{path}\nedit it, then: perfed check {path}, perfed run ./{path}", markup=False)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A method's file, or its name.", show_default=False)], json: Json = False
) -> None:
    """Run the contract tests on a method."""
    entry = catalog.find(file)
    from perfed.contract.runner import check_method

    console, results = _console(json), []
    for title, error in check_method(entry):
        results.append({"check": title, "ok": error is None, "error": error})
        console.print(
            f"{'ok    ' if error is None else 'FAILED'} {title}" + ("" if error is None else f": {error}"), markup=False
        )
    failed = sum(not r["ok"] for r in results)
    if json:
        _print_json({"method": entry.name, "checks": results, "failed": failed})
    if failed:
        sys.stderr.write(f"perfed: {entry.name} fails {failed} of {len(results)} checks\n")
        raise typer.Exit(1)


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine has, and what perfed would make of it."""
    from perfed.training.machine import findings

    found = findings()
    if json:
        _print_json(found)
        return
    for key, value in found.items():
        _console(False).print(f"{key:<12} {value}", markup=False)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="What to measure: cpu or gpu.")],
    repeats: Annotated[int, typer.Option(help="Rounds to measure, after one that warms up.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A try-out on little data; its ratios mean nothing.")] = False,
    json: Json = False,
) -> None:
    """How fast a round is here, against a plain PyTorch loop in the same run."""
    from perfed.studies import bench

    module, console = bench.find(what), _console(json)
    found = module.measure(repeats=repeats, quick=quick, say=lambda text: console.print(text, markup=False))
    if json:
        _print_json(found)
        return
    for line in module.report(found):
        console.print(line, markup=False)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"perfed {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def main() -> None:
    """The `perfed` command."""
    debug = "--debug" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        code = app(words, standalone_mode=False, prog_name="perfed")
    except Problem as problem:
        code = _complain(str(problem))
    except UsageMistake as mistake:
        text = mistake.format_message()
        verb = re.match(r"No such command '([^']*)'", text)
        code = _complain(f"there is no command '{verb[1]}'{nearest(verb[1], _verbs())}" if verb else text)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        code = 1
    except OSError as error:  # a full disk, a folder without permission, a name too long
        if debug:
            raise
        code = _complain(f"{error.strerror or error}" + (f": '{error.filename}'" if error.filename else ""))
    except Exception as error:
        if debug:
            raise
        sys.stderr.write(f"perfed: {type(error).__name__}: {error} (a bug? --debug shows where)\n")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _verbs() -> list[str]:
    every = [*app.registered_commands, *app.registered_groups, *partitions.registered_commands]
    return [str(one.name or getattr(one.callback, "__name__", "")) for one in every]


def _complain(text: str) -> int:
    sys.stderr.write("perfed: " + " ".join(text.split()) + "\n")
    return 2
