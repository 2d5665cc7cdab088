"""Many runs at a time: as alone, bit for bit, and whatever happens to one of them or to all."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from laconic.comparison import Manner, Trial, compare_tables, run_trials
from laconic.config import Table, experiment_from
from laconic.core import RunError
from laconic.experiment import Experiment
from laconic.report import read_run

QUIET: dict[str, Any] = {"progress": False}


def outcome(path: Path) -> Any:
    """All that a run says, but for the times and the workers."""
    record = read_run(path)
    assert record.summary is not None
    history = [{key: value for key, value in each.items() if key != "seconds"} for each in record.history]
    return history, {key: value for key, value in record.summary.items() if key != "seconds"}


def stamps(out: Path) -> dict[str, int]:
    """When each run's summary was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}


@pytest.mark.parametrize("processes", [0, 2])
def test_every_run_ends_as_it_would_alone(tmp_path: Path, tables: list[tuple[str, Table]], processes: int) -> None:
    found = compare_tables(tables, out=tmp_path / "many", seeds=2, processes=processes, **QUIET)
    assert [(run.entry, run.seed, run.failure) for run in found.outcomes] == [
        ("whole", 0, None),
        ("2 bits", 0, None),
        ("whole", 1, None),
        ("2 bits", 1, None),
    ]
    for run in found.outcomes:
        table = dict(tables)[run.entry]
        alone = {**table, "run": {**table["run"], "seed": run.seed, "name": run.path.name, "workers": 0}}
        experiment_from(alone).run(out=tmp_path / "alone")
        assert outcome(run.path) == outcome(tmp_path / "alone" / run.path.name)
    assert not list((tmp_path / "many" / "logs").glob("*"))


def test_what_is_done_is_not_repeated_and_more_can_be_asked_for(
    tmp_path: Path, tables: list[tuple[str, Table]]
) -> None:
    compare_tables(tables[:1], out=tmp_path, seeds=1, **QUIET)
    before = stamps(tmp_path)
    found = compare_tables(tables, out=tmp_path, seeds=2, **QUIET)
    assert len(found.outcomes) == 4
    after = stamps(tmp_path)
    assert len(after) == 4
    assert after["whole-s0"] == before["whole-s0"]
    compare_tables(tables[:1], out=tmp_path, seeds=1, overwrite=True, **QUIET)
    assert stamps(tmp_path)["whole-s0"] > before["whole-s0"]


def test_other_settings_are_refused_before_anything_runs(tmp_path: Path, tables: list[tuple[str, Table]]) -> None:
    compare_tables(tables[:1], out=tmp_path, seeds=1, **QUIET)
    (name, table), other = tables[0], tables[1]
    changed = {**table, "method": {**table["method"], "lr": 0.01}}
    with pytest.raises(RunError, match=r"whole-s0: method.lr was 0.2 and is 0.01 now"):
        compare_tables([other, (name, changed)], out=tmp_path, seeds=1, **QUIET)
    assert list(stamps(tmp_path)) == ["whole-s0"]


def broken(how: Callable[[], object], table: Table) -> Experiment:
    """An experiment that fails in its third round, outside any client's local update."""
    made = experiment_from(table)

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(made.simulation, name)

        def __iter__(self) -> Any:
            with closing(iter(made.simulation)) as rounds:  # type: ignore[type-var]
                yield next(rounds)
                yield next(rounds)
            how()

    return Experiment(Failing(), made.name, made.config, made.facts)  # type: ignore[arg-type]


def divide() -> float:
    return 1 / 0


def end_at_once() -> None:
    """The kernel's way: no last words."""
    os.kill(os.getpid(), signal.SIGKILL)


WORDS = "ZeroDivisionError: division by zero (traceback in logs/bad-s0.log)"


@pytest.mark.parametrize(
    ("processes", "how", "said"),
    [
        (0, divide, WORDS),
        (2, divide, WORDS),
        (2, end_at_once, "its process ended with signal 9 (SIGKILL); is there memory enough?"),
    ],
)
def test_one_that_fails_does_not_cost_the_others(
    tmp_path: Path, tables: list[tuple[str, Table]], processes: int, how: Callable[[], object], said: str
) -> None:
    good = {**tables[0][1], "run": {**tables[0][1]["run"], "workers": 0}}
    bad = {**good, "run": {**good["run"], "name": "bad-s0"}}
    trials = [
        Trial("bad", 0, "bad-s0", partial(broken, how, bad)),
        Trial("good", 0, "run", partial(experiment_from, good)),
    ]
    failures = run_trials(trials, Manner(tmp_path), processes=processes)
    assert failures == {"bad-s0": said}
    assert read_run(tmp_path / "run").finished
    assert not read_run(tmp_path / "bad-s0").finished
    if how is divide:
        assert "in divide" in (tmp_path / "logs" / "bad-s0.log").read_text()
    # Mended, it goes on from its checkpoint and ends as one that never failed.
    mended = [Trial("bad", 0, "bad-s0", partial(experiment_from, bad)), trials[1]]
    assert run_trials(mended, Manner(tmp_path), processes=processes) == {}
    assert outcome(tmp_path / "bad-s0") == outcome(tmp_path / "run")


def long(tables: list[tuple[str, Table]]) -> list[tuple[str, Table]]:
    return [(name, {**table, "run": {**table["run"], "rounds": 60, "eval_every": 20}}) for name, table in tables]


def rounds_made(out: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in out.glob("*/metrics.jsonl"))


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("all_at_once", [False, True])
def test_killed_at_once_and_resumed(
    tmp_path: Path, fork: Any, tables: list[tuple[str, Table]], all_at_once: bool
) -> None:
    entries = long(tables)
    compare_tables(entries, out=tmp_path / "whole", seeds=2, **QUIET)
    out = tmp_path / "killed"
    work = partial(compare_tables, entries, out=out, seeds=2, processes=2, **QUIET)
    killed_after = []
    for least in (20, 130):  # while the first runs are going, and while the last ones are
        child = fork(work)
        deadline = time.monotonic() + 120
        while rounds_made(out) < least and child.wait(0) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        runs = children(child.pid)
        child.kill(signal.SIGKILL)
        if all_at_once:  # as when a machine goes down
            for pid in runs:
                os.kill(pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        killed_after.append(stamps(out))
    first, second = killed_after
    assert len(first) < len(second) < 4, "the kills came too late to be kills"
    assert fork(work).wait(120) == 0, (tmp_path / "child.log").read_text()
    ended = stamps(out)
    for before in killed_after:  # runs that had ended were left alone
        assert {name: ended[name] for name in before} == before
    for path in (tmp_path / "whole").glob("*/summary.json"):
        assert outcome(out / path.parent.name) == outcome(path.parent)
    for made in ("whole", "killed"):
        rows = json.loads((tmp_path / made / "table.json").read_text())["table"]
        assert [row["runs"] for row in rows] == [2, 2]


def test_ctrl_c_keeps_the_last_whole_rounds(tmp_path: Path, fork: Any, tables: list[tuple[str, Table]]) -> None:
    # Rounds long enough that the moment in which one is kept, when an interrupt costs it, is not met by chance.
    slow_to_save = [
        (name, {**t, "run": {**t["run"], "checkpoint_every": 1000}, "method": {**t["method"], "local_epochs": 60}})
        for name, t in long(tables)
    ]
    out = tmp_path / "out"
    child = fork(partial(compare_tables, slow_to_save, out=out, seeds=1, processes=2, **QUIET))
    deadline = time.monotonic() + 60
    going: list[Path] = []
    while len(going) < 2 and time.monotonic() < deadline:
        going = [path for path in out.glob("*/metrics.jsonl") if path.read_text().count("\n") > 2]
        time.sleep(0.01)
    runs = children(child.pid)
    child.kill(signal.SIGINT)
    assert child.wait() == 70  # KeyboardInterrupt, out of the call
    assert len(runs) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in runs)
    for path in out.glob("*-s0"):
        newest = max(int(file.stem.partition("-")[2]) for file in (path / "checkpoints").glob("*.json"))
        assert newest == len(read_run(path).history) > 0


def test_a_folder_in_use_is_refused(
    tmp_path: Path, tables: list[tuple[str, Table]], fork: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.comparison.trials._WAIT", 0.2)
    child = fork(partial(compare_tables, long(tables), out=tmp_path, seeds=2, **QUIET))
    deadline = time.monotonic() + 60
    while not rounds_made(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RunError, match="in use by another comparison"):
        compare_tables(long(tables), out=tmp_path, seeds=2, **QUIET)
    child.kill(signal.SIGTERM)
