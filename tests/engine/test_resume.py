"""kill -9 at any moment, then --resume: the same end as without, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.core import RunError
from laconic.engine import Checkpoints, Evaluation, RunDirectory, Simulation, checkpoint, execute, files
from laconic.engine.files import cannot_write
from laconic.engine.simulate import Metrics
from laconic.engine.workers import Pool
from laconic.evaluations import EVALUATIONS

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


@dataclass(frozen=True)
class Signal:
    """Says when a round has been kept, and finds nothing."""

    round: int
    kept: threading.Event
    at_end = False

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        if run.state.round == self.round:
            self.kept.set()
        return {}


def written_late(toys: Any, then: Callable[[], None]) -> Any:
    """A run whose second checkpoint is not written before the third round is kept; `then` happens first."""
    kept = threading.Event()
    write = checkpoint.write_atomically

    def late(path: Path, data: bytes) -> None:
        if path.name == "round-000002.safetensors":
            assert kept.wait(60)
            then()
        write(path, data)

    checkpoint.write_atomically = late  # type: ignore[attr-defined]
    return three_rounds(toys, Signal(3, kept))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_atomically", checkpoint.write_atomically)  # whatever the test puts there


def run_to(simulation: Any, out: Path) -> None:
    execute(simulation, {}, facts={}, directory=RunDirectory(out, "r"), resume=True, checkpoint_every=1)


def three_rounds(toys: Any, *more: Evaluation) -> Any:
    how = {"up": "ef(topk:fraction=0.3)", "down": "eden:bits=3", "store": "disk"}
    return toys.simulation(toys.remembering(), rounds=3, evaluations=[*EVALUATIONS, *more], **how)


FILE = Path("r", "checkpoints", "round-000002.json")


@pytest.mark.usefixtures("restored")
def test_a_round_trains_while_the_checkpoint_before_is_written(toys: Any, tmp_path: Path) -> None:
    """What is written is the state as it was, states of clients on disk included."""
    run_to(three_rounds(toys), tmp_path / "whole")
    kept: list[Any] = []

    def look() -> None:
        kept.append(sorted((tmp_path / "late" / "r" / "checkpoints").glob("*.json"))[-1].stem)

    run_to(written_late(toys, look), tmp_path / "late")
    assert kept == ["round-000001"]
    said = [json.loads((tmp_path / out / FILE).read_text()) for out in ("late", "whole")]
    for manifest in said:
        del manifest["notes"], manifest["sha256"]  # how long records are, which say how long rounds took
    assert said[0] == said[1]
    assert outcome(tmp_path / "late") == outcome(tmp_path / "whole")
    assert not list(tmp_path.rglob(f"{files.TEMPORARY}*"))


def test_killed_while_the_next_round_trains(toys: Any, tmp_path: Path, fork: Any) -> None:
    run_to(three_rounds(toys), tmp_path / "whole")

    def work() -> None:
        run_to(written_late(toys, lambda: os.kill(os.getpid(), signal.SIGKILL)), tmp_path / "killed")

    assert fork(work).wait() == -signal.SIGKILL
    found = Checkpoints(tmp_path / "killed" / "r" / "checkpoints").load()
    assert found is not None
    assert found[0].round == 1  # one round more is lost than was between checkpoints
    run_to(three_rounds(toys), tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


@pytest.mark.usefixtures("restored")
def test_an_error_while_writing_ends_the_run_a_round_later(toys: Any, tmp_path: Path) -> None:
    def full() -> None:
        raise cannot_write(Path("there"), OSError(errno.ENOSPC, "No space left on device"))

    with pytest.raises(RunError, match=r"^cannot write there: no space left on device; free some space or"):
        run_to(written_late(toys, full), tmp_path)
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "r" / "summary.json").exists()
