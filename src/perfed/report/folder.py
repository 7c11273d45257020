"""Writes the report folder of a finished run, and a card beside every model."""

from __future__ import annotations

from pathlib import Path

from perfed.core.words import visible
from perfed.data.preparation import words
from perfed.report.picture import picture
from perfed.report.tables import SHOWN, card, clients_csv, headings, lines, markdown, remarks
from perfed.training.config import RunConfig
from perfed.training.folder import card_file
from perfed.training.results import Run


def up_to(config: RunConfig) -> str:
    """Say how many rounds were asked for."""
    return f"{config.rounds}" if not config.patience else f"up to {config.rounds} (patience {config.patience})"


def write_report(run: Run) -> Path:
    """Write a summary, a CSV file and a picture into the run's folder, and a card beside every client's model."""
    folder, files = run.folder.report, run.folder.files
    files.make(folder)
    data, config = run.config.data, run.config.run
    last = all(method["saved_round"] == method["rounds"] for method in run.summary())
    when = "last round" if last else "the round whose models are saved"
    headline = SHOWN[run.headline]
    title = headline[0].upper() + headline[1:]
    gain = f"{headline} minus that of Local" if run.sign > 0 else f"Local's {headline} minus that of the method"
    about = (
        f"# {visible(run.path.name)}\n\n{data.name}, {len(run.about['clients'])} clients, partition {data.partition}, "
        f"network {run.config.model.title}, {up_to(config)} rounds, participation {config.participation:g}, "
        f"seed {config.seed}.\n{title}: {when}, each client's model on its own test samples. "
        f"Gain: {gain} for the same client; p: Wilcoxon signed-rank test over clients.\n\n"
    )
    preparation = run.about.get("preparation")
    prepared = words(preparation) if preparation else []
    below = "".join(f"\n{visible(line)}.\n" for line in [*prepared, *remarks(run.summary())])
    below += f"\n![{run.metric}]({run.metric}.png)\n"
    files.write(folder / "summary.md", about + markdown(headings(run), lines(run)) + below)
    files.write(folder / "clients.csv", clients_csv(run))
    files.write(folder / f"{run.metric}.png", picture(run))
    for summary in run.summary():
        for id, client in enumerate(run.about["clients"]):
            home = run.folder.method(summary["method"]).client(client["folder"])
            if files.has_folder(home):
                files.write(card_file(home), card(run, summary["method"], id, summary))
    return folder
