"""The table of methods: what each is, what it evaluates, and what it sends."""

from __future__ import annotations

from perfed.report.tables import markdown
from perfed.studies.method_costs import bytes_sent
from perfed.training.catalog import methods

HEADINGS = ("name", "method", "idea", "evaluated", "down", "up", "secure sums")


def table() -> str:
    """Make the table of all methods in Markdown."""
    multiple = lambda value: "0" if value == 0 else "<0.01 P" if value < 0.01 else f"{value:g} P"
    rows = []
    for name, entry in methods().items():
        sent = bytes_sent(entry)
        traffic = multiple(sent["down"]), multiple(sent["up"]), sent["secure_sums"]
        rows.append((f"`{name}`", entry.title, entry.summary, entry.evaluates, *traffic))
    return markdown(HEADINGS, rows)
