"""Long work shows progress: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text


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


class Standing:
    """Where a run stands: rounds, accuracy, bytes up and down, rate and time left."""

    def __init__(self) -> None:
        self.rounds = self.first = self.done = 0
        self.began = 0.0
        self.up = self.down = 0
        self.found = ""

    def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """The run begins, or goes on."""
        self.rounds, self.first, self.began = rounds, len(history), time.monotonic()
        self.up = self.down = 0  # it may begin again elsewhere
        for record in history:
            self._count(record)

    def advanced(self, record: Mapping[str, Any]) -> None:
        """A round was made."""
        self._count(record)

    def _count(self, record: Mapping[str, Any]) -> None:
        self.done = record["round"]
        self.up += record["bytes_up"]
        self.down += record["bytes_down"]
        if record.get("global_accuracy") is not None:
            self.found = f"accuracy {record['global_accuracy']:.4f}"
        elif "global_loss" in record:
            loss = record["global_loss"]
            self.found = "loss not finite" if loss is None else f"loss {loss:.4g}"

    @property
    def rate(self) -> float:
        """Rounds per second."""
        return (self.done - self.first) / max(time.monotonic() - self.began, 1e-9)

    @property
    def left(self) -> float:
        """Seconds."""
        return (self.rounds - self.done) / max(self.rate, 1e-9)

    @property
    def line(self) -> str:
        """Accuracy, bytes and rate."""
        return f"{self.found}  up {size(self.up)}  down {size(self.down)}  {self.rate:.3g} rounds/s".strip()


class Display:
    """A run's rounds, accuracy, bytes up and down, rate and time left."""

    def __init__(self, console: Console, *, log_seconds: float = 10.0) -> None:
        self._console = console
        self._log_seconds = log_seconds
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._standing = Standing()
        self._logged = 0.0

    def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Show where the run begins."""
        done = len(history)
        self._standing.started(rounds=rounds, history=history)
        self._logged = time.monotonic()
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
        number, standing = record["round"], self._standing
        standing.advanced(record)
        for line in troubles(record):
            self._say(line)
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=number, description=standing.line.removesuffix(" rounds/s") + "/s")
        elif "global_loss" in record or now - self._logged >= self._log_seconds or number == standing.rounds:
            self._logged = now
            self._say(f"round {number}/{standing.rounds}  {standing.line}  {standing.left:.0f} s left")

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Show how it ended."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str) -> None:
        say(self._console, text)


class Board:
    """Many runs at a time: a line for each that is going, and one for all of them."""

    def __init__(self, console: Console, *, log_seconds: float = 10.0) -> None:
        self._console = console
        self._log_seconds = log_seconds
        self._rows: dict[str, Row] = {}
        self._began = self._logged = time.monotonic()
        # No thread of its own: it is drawn anew when whoever runs the runs says so, and processes are forked meanwhile.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def row(self, name: str) -> Row:
        """Who watches the run of this name."""
        self._rows[name] = Row(self, name)
        if self._live is not None:
            self._live.start()
        return self._rows[name]

    def failed(self, name: str, reason: str) -> None:
        """Say so at once."""
        self._rows[name].state = "failed"
        self.say(f"{name}: failed: {reason}")

    def tick(self) -> None:
        """Draw anew, or write a line for each run that is going where the last ones are some time ago."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._drawn(), refresh=True)
        elif now - self._logged >= self._log_seconds:
            self._logged = now
            for row in self._going():
                self.say(f"{row.name}: {row.line}")
            self.say(self._all())

    def say(self, text: str) -> None:
        """A line that stays."""
        say(self._console, text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def _going(self) -> list[Row]:
        return [row for row in self._rows.values() if row.state == "going"]

    def _all(self) -> str:
        states = [row.state for row in self._rows.values()]
        bad = f", {states.count('failed')} failed" if "failed" in states else ""
        ended = f"{states.count('finished')} of {len(states)} runs done{bad}, {states.count('going')} going"
        left = self._left()
        return ended + ("" if left is None else f", about {left:.0f} s left")

    def _left(self) -> float | None:
        """Seconds: rounds still to be made, at the mean pace so far. None while nobody knows."""
        met = [row.standing for row in self._rows.values() if row.standing.rounds]
        made = sum(standing.done - standing.first for standing in met)
        if not made:
            return None
        waiting = sum(row.state == "waiting" for row in self._rows.values())
        going = sum(row.standing.rounds - row.standing.done for row in self._going())
        todo = going + waiting * sum(standing.rounds for standing in met) / len(met)
        return todo * (time.monotonic() - self._began) / made

    def _drawn(self) -> Group:
        table = Table(box=None, pad_edge=False, show_header=False)
        for row in self._going():
            table.add_row(Text(row.name), ProgressBar(row.standing.rounds, row.standing.done, width=8), Text(row.line))
        return Group(table, Text(self._all()))


class Row:
    """One run on a board."""

    def __init__(self, board: Board, name: str) -> None:
        self.name = name
        self.state = "waiting"
        self.standing = Standing()
        self._board = board

    @property
    def line(self) -> str:
        """Where it stands."""
        standing = self.standing
        left = f"  {standing.left:.0f} s left" if standing.done > standing.first else ""
        return f"round {standing.done}/{standing.rounds}  {standing.line}{left}"

    def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """It begins, or goes on."""
        self.state = "going"
        self.standing.started(rounds=rounds, history=history)
        if 0 < len(history) < rounds:
            self._board.say(f"{self.name}: resuming after round {len(history)} of {rounds}")

    def advanced(self, record: Mapping[str, Any]) -> None:
        """A round was made."""
        self.standing.advanced(record)
        for line in troubles(record):
            self._board.say(f"{self.name}: {line}")

    def finished(self, summary: Mapping[str, Any]) -> None:
        """It ended well."""
        self.state = "finished"
        standing = self.standing
        how = "was done already" if standing.first == standing.rounds else f"done in {summary.get('seconds', 0):.1f} s"
        self._board.say(f"{self.name}: {how}  {standing.found}  up {size(standing.up)}  down {size(standing.down)}")


def troubles(record: Mapping[str, Any]) -> Iterator[str]:
    """What did not go well in a round, a line for each."""
    number = record["round"]
    for rejection in record.get("rejections", ()):
        yield (
            f"round {number}: the reply of client {rejection['client']} was refused: "
            f"{rejection['detail']} [{rejection['reason']}]"
        )
    if "abandoned" in record:
        yield f"round {number} abandoned, state unchanged: {record['abandoned']}"


def say(console: Console, text: str) -> None:
    """A line as it is: whatever a user's code calls itself is no markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
