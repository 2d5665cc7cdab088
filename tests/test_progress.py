from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from laconic.progress import Board, Display, size


def record(round: int, **more: Any) -> Mapping[str, Any]:
    return {"round": round, "bytes_up": 1500, "bytes_down": 2_500_000, **more}


def shown(*records: Mapping[str, Any], terminal: bool, rounds: int = 4, done: int = 0, **options: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, legacy_windows=False)
    display = Display(console, **options)
    display.started(rounds=rounds, history=[record(i) for i in range(1, done + 1)])
    for each in records:
        display.advanced(each)
    display.finished({})
    display.close()
    return text.getvalue()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (482_000, "482 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (15_000_000, "15.0 MB"),
        (2_500_000_000, "2.50 GB"),
        (7.25e12, "7.25 TB"),
    ],
)
def test_sizes_have_three_digits(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = shown(
        record(1),
        record(2, global_accuracy=0.91234, global_loss=0.3),
        record(3),
        record(4, global_accuracy=0.95, global_loss=0.2),
        terminal=False,
    )
    lines = text.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("round 2/4  accuracy 0.9123  up 3.00 kB  down 5.00 MB  ")
    assert lines[1].startswith("round 4/4  accuracy 0.9500  up 6.00 kB  down 10.0 MB  ")
    assert lines[1].endswith("rounds/s  0 s left")
    assert "\x1b" not in text


def test_plain_lines_come_from_time_to_time_without_evaluations_too() -> None:
    assert len(shown(*(record(i) for i in range(1, 4)), terminal=False, log_seconds=0.0).splitlines()) == 3
    assert shown(*(record(i) for i in range(1, 4)), terminal=False, log_seconds=60.0) == ""


def test_a_live_line_on_a_terminal() -> None:
    text = shown(record(1), record(2, global_accuracy=0.9, global_loss=0.3), terminal=True)
    assert "\x1b[" in text
    assert "2/4" in text
    for piece in ("accuracy 0.9000", "up 3.00 kB", "down 5.00 MB", "/s", "left"):
        assert piece in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor comes back"


def test_losses_where_there_is_no_accuracy() -> None:
    assert "loss 0.3125" in shown(record(4, global_loss=0.3125), terminal=False)
    assert "loss not finite" in shown(record(4, global_loss=None), terminal=False)


@pytest.mark.parametrize("terminal", [False, True])
def test_refused_replies_and_abandoned_rounds_are_told(terminal: bool) -> None:
    rejection = {"client": 17, "round": 1, "reason": "non_finite", "detail": "[bold]'w' holds NaN"}
    text = shown(record(1, rejections=[rejection], abandoned="0 replies accepted, 1 needed"), terminal=terminal)
    assert "round 1: the reply of client 17 was refused: [bold]'w' holds NaN [non_finite]" in text
    assert "round 1 abandoned, state unchanged: 0 replies accepted, 1 needed" in text


def test_a_resumed_run_says_where_it_goes_on() -> None:
    text = shown(record(3), record(4, global_loss=0.1), terminal=False, done=2)
    assert text.startswith("resuming after round 2 of 4\n")
    assert "up 6.00 kB  down 10.0 MB" in text.splitlines()[-1], "bytes of all four rounds"


def test_a_quiet_console_shows_nothing() -> None:
    text = io.StringIO()
    for terminal in (False, True):
        display = Display(Console(file=text, force_terminal=terminal, quiet=True))
        display.started(rounds=1, history=[])
        display.advanced(record(1, global_loss=0.1, abandoned="x"))
        display.close()
    assert text.getvalue() == ""


# --- many runs -------------------------------------------------------------------------------------------------------


def board(*, terminal: bool, log_seconds: float = 0.0) -> tuple[Board, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, legacy_windows=False)
    return Board(console, log_seconds=log_seconds), text


def test_many_runs_as_plain_lines() -> None:
    shows, text = board(terminal=False)
    one, two, three = (shows.row(name) for name in ("one-s0", "two-s0", "three-s0"))
    one.started(rounds=4, history=[])
    two.started(rounds=4, history=[record(1)])
    one.advanced(record(1, global_accuracy=0.5, global_loss=1.0))
    shows.tick()
    lines = text.getvalue().splitlines()
    assert lines[0] == "two-s0: resuming after round 1 of 4"
    assert lines[1].startswith("one-s0: round 1/4  accuracy 0.5000  up 1.50 kB  down 2.50 MB  ")
    assert lines[1].endswith(" s left")
    assert lines[2] == "two-s0: round 1/4  up 1.50 kB  down 2.50 MB  0 rounds/s", "nobody knows how long"
    assert lines[3].startswith("0 of 3 runs done, 2 going, about ")
    one.finished({"seconds": 2.0})
    shows.failed("two-s0", "[red]no luck")
    three.started(rounds=4, history=[record(i) for i in range(1, 5)])
    three.finished({"seconds": 9.0})
    shows.tick()
    assert text.getvalue().splitlines()[4:] == [
        "one-s0: done in 2.0 s  accuracy 0.5000  up 1.50 kB  down 2.50 MB",
        "two-s0: failed: [red]no luck",
        "three-s0: was done already    up 6.00 kB  down 10.0 MB",
        "2 of 3 runs done, 1 failed, 0 going, about 0 s left",
    ]
    assert "\x1b" not in text.getvalue()


def test_plain_lines_do_not_flood_a_log() -> None:
    shows, text = board(terminal=False, log_seconds=60.0)
    row = shows.row("one-s0")
    row.started(rounds=100, history=[])
    for number in range(1, 101):
        row.advanced(record(number, global_accuracy=0.5, global_loss=1.0))
        shows.tick()
    assert text.getvalue() == ""


def test_many_runs_on_a_terminal() -> None:
    shows, text = board(terminal=True)
    one, two = (shows.row(name) for name in ("one-s0", "two-s0"))
    one.started(rounds=4, history=[])
    two.started(rounds=4, history=[])
    one.advanced(record(1, global_accuracy=0.5, global_loss=1.0, abandoned="nobody came"))
    shows.tick()
    shows.close()
    for piece in ("one-s0", "two-s0", "accuracy 0.5000", "0 of 2 runs done, 2 going"):
        assert piece in text.getvalue()
    assert "one-s0: round 1 abandoned, state unchanged: nobody came" in text.getvalue()
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") > 0, "the cursor comes back"
