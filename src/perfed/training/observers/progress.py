"""One line per method: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from perfed.core.words import visible
from perfed.engines.scores import PERSONAL
from perfed.training.observers import Round

PAUSE = 10.0  # seconds between plain lines


class ProgressLine:
    """Shows rounds done and the current mean score of the personalised models."""

    def __init__(self, console: Console, title: str, rounds: int, done: int = 0, metric: str = "accuracy"):
        self.metric, self.console, self.title, self.rounds = metric, console, f"{visible(title):<10}", rounds
        self.score, self.began = "", time.monotonic()
        self.printed = self.began
        self.bar = None
        if console.is_terminal:
            words = ["{task.description}", "{task.fields[score]}"]
            middle = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
            plain = [TextColumn(text, markup=False) for text in words]
            self.bar = Progress(plain[0], *middle, plain[1], console=console)
            self.task = self.bar.add_task(self.title, total=rounds, completed=done, score="")

    def __enter__(self) -> ProgressLine:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def see(self, event: Round) -> None:
        if event.scores is not None:
            score = event.scores.models[PERSONAL].mean("test", self.metric)
            self.score = f"{self.metric.replace('_', ' ')} " + ("n/a" if score is None else f"{score:.3f}")
        now = time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=event.federation.round, score=self.score)
        elif event.last or now - self.printed >= PAUSE:
            self.printed = now
            line = f"{self.title} {event.federation.round}/{self.rounds}  {now - self.began:.0f} s  {self.score}"
            self.console.print(line, highlight=False)
