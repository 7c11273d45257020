"""Runs the cells of a table: the only place where cells are run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed.studies.machine import Machine
from perfed.studies.papers.cells import Cell, check_cells, missing_cells
from perfed.studies.papers.joining import first_clients, score_newcomers
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.watch import MixtureLog
from perfed.training.config import Config
from perfed.training.engine import is_batched
from perfed.training.prepare import prepare, reopen
from perfed.training.train import train


def carry_out(protocol: Protocol, out: Path, console: Console, machine: Machine) -> None:
    """Run every missing cell of a table; what was interrupted goes on from its checkpoint.

    Where cohorts are batches, the seeds of a row are one batch; elsewhere one cell follows another.

    Args:
        protocol: the table.
        out: the folder of all tables' runs.
        console: where progress goes.
        machine: where and with what to compute.
    """
    check_cells(protocol, out)
    missing, count = missing_cells(protocol, out), 0
    for batch in _batches(missing, protocol, machine):
        count += len(batch)
        cells = [cell for cell in batch if not cell.done]  # a longer run, finished meanwhile, may hold its rounds
        if not cells:
            continue
        column, row = protocol.columns[cells[0].column], protocol.rows[cells[0].row]
        seeds = ", ".join(str(cell.seed) for cell in cells)
        title = f"[{count}/{len(missing)}] {column.title}, {row.title}, seed {seeds}"
        console.print(title)
        configs = [protocol.config(cell.column, cell.row, cell.seed) for cell in cells]
        run_cells(cells, configs, console, machine, row.watch)


def _batches(missing: list[Cell], protocol: Protocol, machine: Machine) -> list[list[Cell]]:
    """Group the cells that are run together: the seeds of a column and row, where cohorts are batches."""
    groups: dict[Any, list[Cell]] = {}
    for cell in missing:
        config = protocol.config(cell.column, cell.row, 0)
        alone = cell.first or not is_batched(machine.configure(config).run)
        groups.setdefault((cell.column, cell.row, cell.seed if alone else None), []).append(cell)
    return list(groups.values())


def run_cells(
    cells: list[Cell], configs: list[Config], console: Console, machine: Machine, watch: bool = False
) -> None:
    """Run cells to their end, from their checkpoints where they have one.

    Args:
        cells: where there are several, their cohorts are one batch.
        configs: a configuration for each.
        console: where progress goes.
        machine: where and with what to compute.
        watch: keep the clients' mixtures, too.
    """
    experiments = []
    for cell, config in zip(cells, configs, strict=True):
        cell.check_settings(config)
        cell.keep_settings(config)
        change = functools.partial(first_clients, share=cell.first) if cell.first else None
        experiments.append(reopen(machine.configure(config), cell.folder, console, change))
        cell.sign(experiments[-1].device)
    diverged = train(experiments, [cell.folder for cell in cells], console, MixtureLog if watch else None)
    for cell, experiment in zip(cells, experiments, strict=True):
        if cell.folder in diverged:
            console.print(diverged[cell.folder])
            cell.note_divergence(diverged[cell.folder])
        elif cell.first:
            score_newcomers(prepare(experiment.config), cell)
