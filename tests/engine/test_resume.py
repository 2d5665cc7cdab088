"""kill -9 at any moment, then --resume: the same end as without, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.engine import Checkpoints, RunDirectory, execute, files

CONFIG = """
[run]
name = "r"
seed = 3
rounds = 20
cohort = 3
eval_every = 10
checkpoint_every = 2
workers = {workers}
store = "{store}"

[data]
source = "digits"
clients = 8

[model]
name = "mlp"
hidden = [16]

[method]
local_epochs = 1
{method}
"""
CASES = {
    "fedavg": 'name = "fedavg"\nlr = 0.1\n[link]\nup = "float32"',
    # Optimizer state on the server, residuals at the clients, and changes on the way down.
    "fedadam": """name = "fedopt"
server = { name = "adam", lr = 0.02 }
[link]
up = "ef(topk:fraction=0.1)"
down = "eden:bits=4"
""",
    # Private leaves on disk, in both phases, and residuals beside them.
    "lg": """name = "lg_fedavg"
fedavg_rounds = 12
goal = 0.5
goal_on = "test"
[link]
up = "ef(topk:fraction=0.5)"
""",
}


def command(folder: Path, *, out: str, resume: bool) -> Callable[[], None]:
    def work() -> None:
        sys.argv = ["laconic", "run", str(folder / "run.toml"), "--out", str(folder / out), "--quiet"]
        if resume:
            sys.argv.append("--resume")
        main()

    return work


def outcome(folder: Path) -> Any:
    """All that a run leaves, but for the times."""
    summary = json.loads((folder / "r" / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, summary["rounds"] + 1))
    for record in (summary, *lines):
        del record["seconds"]
    found = Checkpoints(folder / "r" / "checkpoints").load()
    assert found is not None
    states = dict(found[0].personal), dict(found[0].codec)
    return summary, lines, (folder / "r" / "model.safetensors").read_bytes(), states


def kill_and_resume(tmp_path: Path, fork: Any, case: str, *, kills: int, workers: int, seed: int) -> None:
    store = "disk" if case == "lg" else "memory"
    (tmp_path / "run.toml").write_text(CONFIG.format(method=CASES[case], workers=workers, store=store))
    began = time.monotonic()
    assert fork(command(tmp_path, out="whole", resume=False)).wait() == 0, (tmp_path / "child.log").read_text()
    duration = time.monotonic() - began
    whole = outcome(tmp_path / "whole")
    chance = random.Random(seed)
    killed = 0
    while killed < kills:
        out = f"killed-{killed}"
        while True:
            child = fork(command(tmp_path, out=out, resume=True))
            # Between the start of the process and its end; past the last kill, it runs to its end.
            code = child.wait(chance.uniform(0, duration) if killed < kills else 60)
            if code is None:
                child.kill()
                code = child.wait()
            if code != -signal.SIGKILL:  # it had ended, or did so while we aimed
                assert code == 0, (tmp_path / "child.log").read_text()
                break
            killed += 1
        assert outcome(tmp_path / out) == whole
        shutil.rmtree(tmp_path / out)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What a child would import again and again."""
    import sklearn.datasets  # noqa: F401


@pytest.mark.parametrize(("case", "workers"), [("fedavg", 2), ("fedadam", 0), ("lg", 0)])
def test_killed_at_random_moments(tmp_path: Path, fork: Any, case: str, workers: int) -> None:
    kill_and_resume(tmp_path, fork, case, kills=5, workers=workers, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "workers"), [("fedavg", 0), ("fedadam", 2), ("lg", 2)])
def test_killed_at_many_random_moments(tmp_path: Path, fork: Any, case: str, workers: int) -> None:
    kill_and_resume(tmp_path, fork, case, kills=25, workers=workers, seed=2)


def die_at_step(step: int) -> Callable[[], int]:
    """Let this process die by SIGKILL right before its `step`-th step on the disk, or in the middle of a record."""
    done = 0

    def count() -> None:
        nonlocal done
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    fsync, replace, unlink, write_all = os.fsync, Path.replace, Path.unlink, files.write_all

    def counted_fsync(handle: int) -> None:
        count()
        fsync(handle)

    def counted_replace(path: Path, target: Path) -> Path:
        count()
        return replace(path, target)

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        count()
        unlink(path, missing_ok)

    def counted_write(file: Any, data: bytes) -> None:
        write_all(file, data[: len(data) // 2])
        count()
        write_all(file, data[len(data) // 2 :])

    import laconic.engine.run as run_module
    import laconic.engine.store as store_module

    os.fsync, Path.replace, Path.unlink = counted_fsync, counted_replace, counted_unlink  # type: ignore[method-assign]
    run_module.write_all = store_module.write_all = counted_write
    return lambda: done


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_of_writing(toys: Any, tmp_path: Path, fork: Any, every: int, store: str) -> None:
    """Before every sync, rename and removal, and in the middle of every record: all moments that differ on a disk."""

    def work(out: Path, step: int) -> Callable[[], None]:
        def run() -> None:
            steps = die_at_step(step)
            simulation = toys.simulation(
                toys.remembering(),
                rounds=4,
                eval_every=2,
                up="ef(topk:fraction=0.3)",
                down="eden:bits=3",
                store=store,
            )
            directory = RunDirectory(out, "r")
            execute(simulation, {}, facts={}, directory=directory, resume=True, checkpoint_every=1)
            (out / "steps").write_text(str(steps()))

        return run

    never = 10**9
    assert fork(work(tmp_path / "whole", never)).wait() == 0, (tmp_path / "child.log").read_text()
    whole = outcome(tmp_path / "whole")
    steps = int((tmp_path / "whole" / "steps").read_text())
    assert steps > 40
    for step in range(0, steps, every if store == "memory" else 5 * every):
        out = tmp_path / "killed"
        assert fork(work(out, step)).wait() == -signal.SIGKILL
        # Killed a second time while it recovers, and then left alone.
        fork(work(out, step % 7)).wait()
        assert fork(work(out, never)).wait() == 0, (tmp_path / "child.log").read_text()
        assert outcome(out) == whole, f"step {step} of {steps}"
        assert not list(out.rglob(f"{files.TEMPORARY}*"))
        shutil.rmtree(out)
