"""Long work shows progress: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column


def size(num_bytes: float) -> str:
    """Bytes for people: decimal units, three digits.

    >>> size(1234), size(15_000_000), size(482_000)
    ('1.23 kB', '15.0 MB', '482 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} B" if unit == "B" else f"{_three(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{_three(num_bytes)} TB"


def _three(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


class Display:
    """Rounds, accuracy, bytes up and down, rate and time left."""

    def __init__(self, console: Console, *, log_seconds: float = 10.0) -> None:
        self._console = console
        self._log_seconds = log_seconds
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._rounds = self._first = 0
        self._began = self._logged = 0.0
        self._up = self._down = 0
        self._judged = ""

    def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Show where the run begins."""
        done = len(history)
        self._rounds, self._first = rounds, done
        self._up = sum(record["bytes_up"] for record in history)
        self._down = sum(record["bytes_down"] for record in history)
        self._began = self._logged = time.monotonic()
        if done:
            self._console.print(f"resuming after round {done} of {rounds}", highlight=False)
        if self._console.is_terminal:
            self._live = Progress(
                # As narrow as it can be said: a line of eighty columns holds it all.
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=8),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
                TextColumn("left"),
                console=self._console,
            )
            self._task = self._live.add_task("", total=rounds, completed=done)
            self._live.start()

    def advanced(self, record: Mapping[str, Any]) -> None:
        """Show a round."""
        number = record["round"]
        self._up += record["bytes_up"]
        self._down += record["bytes_down"]
        if record.get("global_accuracy") is not None:
            self._judged = f"accuracy {record['global_accuracy']:.4f}"
        elif "global_loss" in record:
            loss = record["global_loss"]
            self._judged = "loss not finite" if loss is None else f"loss {loss:.4g}"
        for rejection in record.get("rejections", ()):
            self._say(
                f"round {number}: the reply of client {rejection['client']} was refused: "
                f"{rejection['detail']} [{rejection['reason']}]"
            )
        if "abandoned" in record:
            self._say(f"round {number} abandoned, state unchanged: {record['abandoned']}")
        now = time.monotonic()
        rate = (number - self._first) / max(now - self._began, 1e-9)
        line = f"{self._judged}  up {size(self._up)}  down {size(self._down)}  {rate:.3g} rounds/s"
        if self._live is not None:
            self._live.update(self._task, completed=number, description=line.strip().removesuffix(" rounds/s") + "/s")
        elif "global_loss" in record or now - self._logged >= self._log_seconds or number == self._rounds:
            self._logged = now
            left = (self._rounds - number) / max(rate, 1e-9)
            self._say(f"round {number}/{self._rounds}  {line.strip()}  {left:.0f} s left")

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Show how it ended."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
