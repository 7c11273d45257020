"""perfed models, perfed predict, perfed personalise: what a finished run is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perfed import data as sources
from perfed.cli.options import Json, MethodOfRun, Out, Quiet, RunFolder, Sets
from perfed.cli.output import answer, console_for
from perfed.core.errors import Problem
from perfed.training.config import assign, from_dict, refuse_taken


def models(
    run: RunFolder,
    method: MethodOfRun = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also look into every file of every method, however many there are.")
    ] = False,
    json: Json = False,
) -> None:
    """List every client's model: its score and its file. A file that is damaged or missing is named instead."""
    from perfed.api import load  # imports torch
    from perfed.report.tables import score

    opened = load(run)
    clients = opened.clients(method)
    count = opened.check() if check else opened.check([clients[0].method], thorough=False)
    listed = [{"client": client.name, opened.metric: client.score, "path": str(client.path)} for client in clients]
    lines = (f"{client.name:<20} {score(client.score):>6}   {client.path}" for client in clients)
    about = {"run": str(run), "method": clients[0].method, "models": listed}
    if check:
        lines, about["checked"] = [*lines, f"{count} files are as they were written"], count
    answer(json, about, lines)


def predict(
    run: RunFolder,
    client: Annotated[str, typer.Option(help="The client's name.")],
    input: Annotated[
        Path, typer.Option(help=".npz with x, .npy, or .csv with one sample per line; columns of tables go by name.")
    ],
    method: MethodOfRun = None,
    json: Json = False,
) -> None:
    """Predict the classes of a file's samples (or labels, numbers, tokens) with a client's model."""
    from perfed.api import load  # imports torch
    from perfed.data.records import Records
    from perfed.data.samples import read_records, read_samples

    chosen, console = load(run).client(client, method), console_for(json_wanted=True)  # beside the predictions
    samples = read_records(input) if chosen.named else read_samples(input, chosen.sample)
    if isinstance(samples, Records) and samples.columns is None:
        console.print(f"{input} does not name its columns: they are taken as they stand", markup=False)
    predicted = chosen.predict(samples, lambda text: console.print(text, markup=False)).tolist()
    named = chosen.run.task.kind == "classification"
    names = [chosen.run.labels[number] if named else number for number in predicted]
    about = {"client": chosen.name, "method": chosen.method, "predictions": predicted, "labels": names}
    answer(json, about, map(str, names))


def personalise(
    run: RunFolder,
    file: Annotated[
        Path | None,
        typer.Argument(help="A file with one client, a table of several, or a folder with a file for each."),
    ] = None,
    data: Annotated[str, typer.Option(help="Data set of the new clients; 'folder' for your own files.")] = "folder",
    data_dir: Annotated[str | None, typer.Option(help="The same as FILE; for another data set, its folder.")] = None,
    method: MethodOfRun = None,
    rounds: Annotated[int, typer.Option(help="Local rounds; nothing is sent.", min=0, max=10_000)] = 1,
    fine_tune: Annotated[int, typer.Option(help="Epochs of fine-tuning after them.", min=0, max=10_000)] = 0,
    sets: Sets = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give clients that never took part models, beside the general one and Local: a run folder like any other."""
    if file is not None and data_dir is not None:
        raise Problem("the new clients' files are named twice: give FILE or --data-dir")
    place = data_dir if file is None else str(file)
    raw: dict[str, Any] = {"data": {"name": data, **({} if place is None else {"dir": place})}}
    for text in sets or []:
        assign(raw, text)
    if set(raw) != {"data"}:
        raise Problem("a newcomer's method has the run's settings: --set takes data.key=value here")
    config = from_dict(raw).data
    sources.check(config)
    refuse_taken(out)
    from perfed import api  # imports torch
    from perfed.report.tables import headings, lines, on_terminal, remarks, rich_table, score

    opened = api.load(run)
    name = method or opened.main
    made = api.personalise(opened, config, name, rounds, fine_tune, out, quiet=quiet)
    listed = [{"client": client.name, "path": str(client.path), **client.scores} for client in made.clients(name)]
    if json:
        answer(json, {"run": str(run), "method": name, "folder": str(made.path), "clients": listed}, ())
        return
    console = console_for(json)
    console.print(rich_table(headings(made), lines(made), on_terminal(made)), soft_wrap=False)
    for line in remarks(made.summary()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    shown = lambda client: score(client["personal"]["test"][made.metric])
    told = [f"{client['client']:<20} {shown(client):>6}   {client['path']}" for client in listed]
    answer(json, None, ["", *told, "", f"report   {made.folder.report}"])
