"""Tables: on the terminal with rich, in files as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.table import Table

from perfed.core.errors import few
from perfed.core.task import KINDS
from perfed.core.words import visible
from perfed.data.preparation import words
from perfed.engines.scores import PERSONAL
from perfed.federation.faults import in_words
from perfed.federation.traffic import PUBLIC_DATA
from perfed.training.config import RunConfig
from perfed.training.folder import preparation_of
from perfed.training.prepare import BASELINE
from perfed.training.results import Run

TextTable = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, and rows


def size(count: float) -> str:
    """Write a number of bytes in a unit that suits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def score(value: float | None) -> str:
    """Write a score, or n/a where there were no samples; large errors have fewer digits behind the point."""
    return "n/a" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.5g}"


def signed(value: float | None) -> str:
    """Write a difference of scores."""
    return "n/a" if value is None else f"{value:+.3f}" if abs(value) < 100 else f"{value:+.5g}"


HEADINGS = ("", "evaluated", "mean", "weighted", "worst tenth", "better than Local", "gain", "down", "up", "p", "time")
SHOWN = {name: score.heading for task in KINDS.values() for name, score in task.scores.items()}
SCORES = 7  # of these columns say whose scores they are, and which
NAMED = 3  # refused uploads that are named below a table
LABELS = 20  # labels that a card names


def headings(run: Run) -> tuple[str, ...]:
    """Return the headings of a run's table: other scores stand beside the headline where accuracy says little."""
    return (*HEADINGS[:SCORES], *(SHOWN[key] for key in run.columns), *HEADINGS[SCORES:])


def on_terminal(run: Run) -> int:
    """Return how many of the first columns fit into 80 characters: bytes make room for scores."""
    return SCORES + (len(run.columns) or 2)


def lines(run: Run) -> list[tuple[str, ...]]:
    """Return the cells of a run's table, a line for each method and for each further model that it evaluates."""
    rows = []
    for method in run.summary():
        gain, sent = method["gain"], method["bytes"]
        better, mean, p = "-", "-", "-"
        if gain is not None:
            better, mean = f"{gain['better']} of {gain['clients']}", signed(gain["mean"])
            p = "n/a" if gain["p"] is None else f"{gain['p']:.3f}"
        title = method["title"] + " (diverged)" * bool(method["diverged"])
        traffic, seconds = (size(sent["down"]), size(sent["up"])), f"{method['seconds']:.1f} s"
        for model, spread in method["spread"].items():
            more = [score(method["scores"][model][key]) for key in run.columns]
            if model == PERSONAL:
                first, last = (title, method["evaluates"]), (*traffic, p, seconds)
            else:
                first, better, mean, last = (f"  {model}", ""), "", "", ("",) * 4
            rows.append((*first, *_scores(spread), better, mean, *more, *last))
    return rows


def _scores(accuracy: dict[str, float | None]) -> list[str]:
    return [score(accuracy[key]) for key in ("mean", "weighted", "worst10")]


def remarks(methods: list[dict[str, Any]]) -> list[str]:
    """Return sentences to stand below a table: what its numbers do not say.

    Why other scores than accuracy stand in it, bytes between servers, public data, clients that failed (one line for
    all methods that failed alike), the simulated clock, uploads that were not used, samples that were made up, clients
    that had nothing to train with, and training that diverged.
    """
    amounts = lambda extra: ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in extra.items())
    extra = [(method["title"], dict(method["bytes"]["extra"])) for method in methods]
    public = [(title, counts.pop(PUBLIC_DATA, 0)) for title, counts in extra]
    why = [methods[0]["why"]] if methods and methods[0].get("why") else []
    between = "between servers, in neither down nor up"
    lines = why + [f"{title} {between}: {amounts(counts)}" for title, counts in extra if counts]
    lines += [f"{title}: public data once to each client, not in down: {size(sent)}" for title, sent in public if sent]
    failed: dict[str, list[str]] = {}
    for method in methods:
        if method.get("faults"):
            failed.setdefault(in_words(method["faults"]), []).append(method["title"])
    lines += [f"{', '.join(titles)}: {words}" for words, titles in failed.items()]
    clocks = [f"{method['title']} {method['clock']:,.1f} s" for method in methods if method.get("clock") is not None]
    lines += [f"simulated time: {', '.join(clocks)}"] if clocks else []
    changes = [(method["title"], change) for method in methods for change in method.get("changes", [])]
    lines += [f"{title}: settings changed {change}" for title, change in changes]
    lines += [f"{method['title']}: {refusals(method['refused'])}" for method in methods if method.get("refused")]
    lines += [f"{method['title']}: {extended(method['extended'])}" for method in methods if method.get("extended")]
    lines += [without_training(methods[0]["untrained"])] if methods and methods[0].get("untrained") else []
    return lines + [f"{method['title']}: {method['diverged']}" for method in methods if method.get("diverged")]


def extended(clients: dict[str, dict[str, int]]) -> str:
    """Say how many samples were made up, by what is known of each client."""
    made, left_out, all = (sum(each[what] for each in clients.values()) for what in ("made", "left_out", "train"))
    return f"{made:,} samples joined those of {len(clients)} clients, {left_out:,} were left out; they train on {all:,}"


def without_training(names: list[str]) -> str:
    """Return who had no training samples, and what became of them."""
    count = len(names)
    listed = few([plain_text(name) for name in names], NAMED)
    return (
        f"{count} client{'s' * (count > 1)} without training samples ({listed}) did not train; predictions for "
        f"{'them' if count > 1 else 'it'} are those of the server's model, with Local those of the initial one"
    )


def refusals(refused: dict[str, Any]) -> str:
    """Return how many uploads were not used, and of the first ones who sent them and why they were refused."""
    count, known = refused["count"], refused["first"][:NAMED]
    what = lambda refusal: f"{refusal['tensor']}: {refusal['reason']}" if refusal["tensor"] else refusal["reason"]
    named = "; ".join(f"client '{each['client']}' in round {each['round']} ({what(each)})" for each in known)
    more = f"; {count - len(known)} more in rounds.jsonl" if count > len(known) else ""
    return f"{count} upload{'s' * (count > 1)} not used: {named}{more}"


def rich_table(headings: tuple[str, ...], rows: list[tuple[str, ...]], columns: int | None = None) -> Table:
    """Make a table for the terminal; long headings take two lines."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for index, heading in enumerate(headings[:columns]):
        table.add_column(heading.replace(" ", "\n", 1), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row[:columns])
    return table


def markdown(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Make a table in Markdown."""
    safe = lambda cell: visible(cell).replace("|", "\\|").replace("\n", " ").strip()
    text = [" | ".join(map(safe, line)) for line in (headings, ("---",) * len(headings), *rows)]
    return "".join(f"| {line} |\n" for line in text)


def clients_csv(run: Run) -> str:
    """Write a line for each client: its sizes, and every method's test score."""
    out = io.StringIO()
    write = csv.writer(out)
    columns = {name: run.scores(name, run.metric) for name in run.entries}
    if run.judged != run.metric:
        columns |= {f"{name} {run.judged}": run.scores(name, run.judged) for name in run.entries}
    write.writerow(["client", "train", "val", "test", *columns])
    for id, client in enumerate(run.about["clients"]):
        sizes = [client[split] for split in ("train", "val", "test")]
        scores = ["" if a[id] != a[id] else f"{a[id]:.6f}" for a in columns.values()]
        write.writerow([safe_cell(client["name"]), *sizes, *scores])
    return out.getvalue()


def safe_cell(name: str) -> str:
    """Quote a name from outside that would be a formula in somebody's spreadsheet."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name


def plain_text(text: str) -> str:
    """Return text from outside in one line, without what ends a piece of code in Markdown."""
    return visible(text.replace("`", "'").replace("\n", " ").replace("\r", " "))


def _of_client(run: Run, method: str, id: int) -> dict[str, Any]:
    """Return the scores of each of a client's models, its personal one first."""
    scores = run.result(method)["clients"][id]
    return {PERSONAL: scores[PERSONAL], **scores}


def options(run: Run, method: str) -> str:
    """Say which options of its training a method had that are not the usual ones; empty where it had none."""
    names = ["augment", "class_weights", "lr_schedule", *(["server_optimizer"] if method != BASELINE else [])]
    chosen = {name: getattr(run.config.run, name) for name in names}
    texts = [f"{name} {value}" for name, value in chosen.items() if value != getattr(RunConfig(), name)]
    clip = run.config.method.get(method, {}).get("clip", 0)
    return ", ".join([*texts, *([f"clip {clip:g}"] if clip else [])])


def _labels(run: Run, client: dict[str, Any]) -> list[str]:
    """Say what the outputs are, and how many samples a client has of each class, or of what stands for classes."""
    counts, known = client.get("labels", {}), (run.about.get("partition") or {}).get("strata")
    several = lambda words: ", ".join(words[:LABELS]) + f" and {len(words) - LABELS} more" * (len(words) > LABELS)
    each = lambda names: several([f"{name} ({counts.get(name, 0)})" for name in names])
    if known is None:
        return [f"labels, in the order of the outputs, and this client's samples of each: {each(run.labels)}"]
    mixed = [f"this client's samples by {known['rule']}: {each(known['names'])}"] if len(known["names"]) > 1 else []
    names, targets = run.labels, (run.about.get("preparation") or {}).get("targets", ())
    if targets:  # the network gives them standardised
        names = [f"{target['name']} = {target['std'] or 1:.6g} * output + {target['mean']:.6g}" for target in targets]
    return [f"outputs, in their order: {several(names)}", *mixed]


def card(run: Run, method: str, id: int, summary: dict[str, Any]) -> str:
    """Describe a client's model, for whoever finds its file."""
    client = run.about["clients"][id]
    name = plain_text(client["name"])
    shown = [run.headline, *run.columns]
    models = [(entry, model, scores) for entry in run.entries for model, scores in _of_client(run, entry, id).items()]
    title = lambda entry, model: run.entries[entry].title + ("" if model == PERSONAL else f", {model}")
    rows = [
        (title(entry, model), *(score(scores["test"].get(run.task.scores[key].metric)) for key in shown))
        for entry, model, scores in models
    ]
    task, shares = run.task, "Test accuracy" if shown == ["accuracy"] else "Test scores"
    preparation = preparation_of(run.about, client["name"])
    about = [] if preparation is None else [plain_text(line) for line in words(preparation.plain())]
    about += [f"training: {text}" for text in [options(run, method)] if text]
    saved, last = summary["saved_round"], summary["rounds"]
    when = "last round" if saved == last else f"round {saved} of {last}, the best on validation samples"
    return (
        f"# Model of client `{name}`, trained with {visible(summary['title'])}\n\n"
        f"- data set: {run.config.data.name}; training samples: {client['train']}; test samples: {client['test']}\n"
        + "".join(f"- {plain_text(line)}\n" for line in _labels(run, client))
        + "".join(f"- {line}\n" for line in about)
        + (f"- task: {task.in_words}; {task.reading}\n" if task.kind != "classification" else "")
        + f"- network: {plain_text(run.network_name(id))}; rounds: {summary['rounds']}; seed: {run.config.run.seed}\n\n"
        f"{shares} on this client's own samples, {when}:\n\n"
        + markdown(("method", *(SHOWN[key] for key in shown)), rows)
        + "\nLoad it from the run folder (three folders up):\n\n```python\nimport perfed\n\n"
        + f"model = perfed.load(RUN).client({client['folder']!r}, {method!r}).model()\n```\n"
    )
