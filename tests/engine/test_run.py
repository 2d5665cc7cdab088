"""A run's folder: names, lock, files, what may change at a resume, disks that fail, and Ctrl-C."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from laconic.core import ClientInfo, ConfigError, PayloadError, RunError, Task, tree_sha256
from laconic.engine import (
    ClientStore,
    DiskStore,
    Record,
    Run,
    RunDirectory,
    Simulation,
    Store,
    execute,
    in_use,
    versions,
)
from laconic.engine.files import TEMPORARY

FACTS = {"model": "linear", "data": "points"}
CONFIG = {"run": {"name": "r", "seed": 0, "workers": 0, "checkpoint_every": 2, "extra": None}, "method": {"lr": 0.1}}


def run(simulation: Simulation, out: Path, **options: Any) -> Run:
    directory = RunDirectory(out, "r")
    return execute(simulation, CONFIG, facts=FACTS, directory=directory, **{"checkpoint_every": 2, **options})


def figures(made: Run) -> Any:
    """All but the times."""
    history = [{n: v for n, v in record.items() if n != "seconds"} for record in made.history]
    return history, {n: v for n, v in made.summary.items() if n != "seconds"}


class Interrupting:
    """Presses Ctrl-C when a round is shown."""

    def __init__(self, at: int) -> None:
        self.at = at

    def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        self.done = len(history)

    def advanced(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.at:
            raise KeyboardInterrupt

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


# --- who is at it ------------------------------------------------------------------------------------------------


def test_who_is_at_a_run_can_be_asked(toys: Any, tmp_path: Path) -> None:
    class Asking(Interrupting):
        def advanced(self, record: Mapping[str, Any]) -> None:
            with multiprocessing.get_context("fork").Pool(1) as pool:  # another process sees it too
                seen.append((in_use(tmp_path / "r"), pool.apply(in_use, (tmp_path / "r",))))

    seen: list[tuple[bool, bool]] = []
    assert not in_use(tmp_path / "r")
    run(toys.simulation(rounds=2), tmp_path, observer=Asking(0))
    assert seen == [(True, True)] * 2
    assert not in_use(tmp_path / "r")


def test_asking_takes_no_lock_and_releases_none(toys: Any, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    directory.open(CONFIG, resume=False)
    assert in_use(tmp_path / "r")
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(RunError, match="in use by another"):
        pool.apply(RunDirectory(tmp_path, "r").open, (CONFIG,), {"resume": True})
    directory.close()
    assert not in_use(tmp_path / "r")


# --- files -------------------------------------------------------------------------------------------------------


def test_the_files_of_a_run(toys: Any, tmp_path: Path) -> None:
    made = run(toys.simulation(rounds=5), tmp_path)
    assert made.directory == tmp_path / "r"
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        *(".lock", "checkpoints", "config.toml", "metrics.jsonl", "model.safetensors", "split.json", "summary.json")
    ]
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert [Record.read(json.loads(line)) for line in lines] == made.history
    assert [json.loads(line) for line in lines] == [record.line() for record in made.history]
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == made.summary
    written = tomllib.loads((tmp_path / "r" / "config.toml").read_text())
    assert written == {"run": {k: v for k, v in CONFIG["run"].items() if v is not None}, "method": {"lr": 0.1}}
    weights = safetensors.torch.load_file(tmp_path / "r" / "model.safetensors")
    assert {n: v.tolist() for n, v in weights.items()} == {n: v.tolist() for n, v in made.model.state_dict().items()}
    assert {path.stem for path in (tmp_path / "r" / "checkpoints").iterdir()} == {
        *("round-000000", "round-000004", "round-000005")
    }


def test_the_summary(toys: Any) -> None:
    simulation = toys.simulation(rounds=3)
    summary = execute(simulation, CONFIG, facts=FACTS).summary
    assert set(summary) >= {
        *("method", "model", "parameters", "rounds", "clients", "cohort", "seed", "global_accuracy", "local_accuracy"),
        *("bytes_up", "bytes_down", "bits_per_parameter_up", "bits_per_parameter_down", "paper_bytes", "seconds"),
        *("state_sha256", "versions"),
    }
    frame = 40 + 4 * 18
    assert summary["parameters"] == 18
    assert summary["bytes_up"] == summary["bytes_down"] == 3 * 6 * frame
    assert summary["bits_per_parameter_up"] == summary["bits_per_parameter_down"] == 8 * frame / 18
    assert summary["paper_bytes"] == 3 * 6 * 2 * 4 * 18
    assert summary["state_sha256"] == tree_sha256(simulation.state.server)
    assert (summary["rounds"], summary["clients"], summary["cohort"], summary["seed"]) == (3, 12, 6, 0)
    assert (summary["method"], summary["model"]) == ("hooked", "linear")
    assert summary["versions"] == versions()
    assert {"laconic", "python", "torch", "numpy"} <= set(summary["versions"])


def test_the_model_predicts_what_the_last_evaluation_says(toys: Any) -> None:
    simulation = toys.simulation(rounds=2)
    made = execute(simulation, CONFIG, facts=FACTS)
    x, y = simulation.clients.test.tensors()
    accuracy = float((made.model(x).argmax(1) == y).float().mean())
    assert made.summary["global_accuracy"] == made.history[-1]["global_accuracy"] == pytest.approx(accuracy)
    assert not made.model.training


def test_a_model_with_tied_weights_is_written(toys: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3))
        net[1].weight = net[0].weight
        return net

    run(toys.simulation(task=Task(build)), tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "r" / "model.safetensors")
    assert torch.equal(weights["0.weight"], weights["1.weight"])


def test_figures_that_are_not_finite_are_null(toys: Any, tmp_path: Path) -> None:
    """NaN is not JSON: a file that holds it can be read by Python only."""

    def overflow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * torch.inf if not output.requires_grad else output.square().mean()

    made = run(toys.simulation(task=Task(lambda: nn.Linear(5, 3), loss=overflow), rounds=2), tmp_path)
    assert made.history[-1]["global_loss"] is None
    assert made.summary["global_loss"] is None

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    for name in ("metrics.jsonl", "summary.json"):
        text = (tmp_path / "r" / name).read_text()
        for part in text.splitlines() if name.endswith("l") else [text]:
            json.loads(part, parse_constant=refuse)


# --- names -------------------------------------------------------------------------------------------------------

HOSTILE = ["../x", "..", ".", "", "/tmp/x", "a/b", "a\\b", "a\0b", "x" * 101, "x" * 300, "ü", "a b", "-x", ".x", "a\n"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.name must be 1 to 100 letters, digits"):
        RunDirectory(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


NAMES = st.text(alphabet=st.sampled_from("ab./\\\0~-_ ü\u202e:\n$*"), max_size=12) | st.text(max_size=300)


@settings(max_examples=1000, deadline=None)
@given(NAMES)
def test_a_name_is_refused_or_one_step_below_the_folder(name: str) -> None:
    with suppress(ConfigError):
        path = RunDirectory(Path("/out"), name).path
        assert os.path.normpath(path) == f"/out/{name}"
        assert name.isascii()
        assert name.isprintable()
        assert len(name) <= 100
        assert not set(name) & set("/\\ :*$~")


@settings(max_examples=60, deadline=None)
@given(NAMES)
@example("../../etc")
@example("CON")
def test_nothing_is_made_outside_the_folder(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outer" / "out"
        out.mkdir(parents=True)
        with suppress(ConfigError):
            directory = RunDirectory(out, name)
            directory.open({}, resume=False)
            directory.close()
        everything = [path.relative_to(folder).parts for path in Path(folder).rglob("*")]
        assert all(parts[:2] == ("outer", "out") or parts == ("outer",) for parts in everything)
        assert {parts[2] for parts in everything if len(parts) > 2} <= {name}


def test_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "r").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"out/r is a link to another folder"):
        RunDirectory(tmp_path / "out", "r").open({}, resume=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- the lock ----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused(toys: Any, tmp_path: Path, fork: Any) -> None:
    directory = RunDirectory(tmp_path, "r")
    directory.open(CONFIG, resume=False)

    def second() -> None:
        for resume in (False, True):
            with pytest.raises(RunError, match=r"r is in use by another process; wait for it"):
                run(toys.simulation(), tmp_path, resume=resume)
        with pytest.raises(RunError, match="in use"):
            run(toys.simulation(), tmp_path, overwrite=True)

    def third() -> None:
        run(toys.simulation(), tmp_path, resume=True)

    before = (tmp_path / "r" / "config.toml").read_bytes()
    assert fork(second).wait() == 0, (tmp_path / "child.log").read_text()
    assert (tmp_path / "r" / "config.toml").read_bytes() == before
    directory.close()
    assert fork(third).wait() == 0, (tmp_path / "child.log").read_text()


def test_a_refused_folder_is_let_go(tmp_path: Path) -> None:
    """No descriptor stays open, and no lock stays held."""
    RunDirectory(tmp_path, "r").close()
    first = RunDirectory(tmp_path, "r")
    first.open(CONFIG, resume=False)
    first.close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(RunError, match="already holds a run"):
            RunDirectory(tmp_path, "r").open(CONFIG, resume=False)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- starting, resuming, overwriting -----------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_started_over_by_accident(toys: Any, tmp_path: Path) -> None:
    first = run(toys.simulation(), tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"already holds a run; go on with --resume, start over with --overwrite"):
        run(toys.simulation(), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    with pytest.raises(ConfigError, match="choose one"):
        run(toys.simulation(), tmp_path, resume=True, overwrite=True)
    again = run(toys.simulation(), tmp_path, overwrite=True)
    assert figures(again) == figures(first)


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_options_about_a_folder_need_one(toys: Any, option: str) -> None:
    with pytest.raises(ConfigError, match="say where it is with out"):
        execute(toys.simulation(), CONFIG, facts=FACTS, **{option: True})


def test_overwriting_leaves_nothing_of_the_old_run(toys: Any, tmp_path: Path) -> None:
    run(toys.simulation(rounds=9), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(toys.simulation(rounds=3), tmp_path, overwrite=True, observer=Interrupting(at=1))
    assert not (tmp_path / "r" / "summary.json").exists()
    assert not (tmp_path / "r" / "model.safetensors").exists()
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 1
    made = run(toys.simulation(rounds=3), tmp_path, resume=True)
    assert figures(made) == figures(execute(toys.simulation(rounds=3), CONFIG, facts=FACTS))


def test_resuming_a_finished_run_changes_nothing(toys: Any, tmp_path: Path) -> None:
    first = run(toys.simulation(), tmp_path)
    watch = Interrupting(at=-1)
    again = run(toys.simulation(), tmp_path, resume=True, observer=watch)
    assert (again.history, again.summary) == (first.history, first.summary)
    assert watch.done == 3


def test_resuming_what_never_began_begins_it(toys: Any, tmp_path: Path) -> None:
    assert figures(run(toys.simulation(), tmp_path, resume=True)) == figures(
        execute(toys.simulation(), CONFIG, facts=FACTS)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": {"lr": 0.2}}, "method.lr was 0.1 and is 0.2 now"),
        ({"run": {**CONFIG["run"], "seed": 1}}, "run.seed was 0 and is 1 now"),
        ({"method": {}}, "method.lr was 0.1 and is None now"),
        ({"model": {"name": "mlp"}}, "model.name was None and is 'mlp' now"),
        ({"run": {**CONFIG["run"], "extra": 3}}, "run.extra was None and is 3 now"),
    ],
)
def test_a_changed_configuration_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    first = RunDirectory(tmp_path, "r")
    first.open(CONFIG, resume=False)
    first.close()
    with pytest.raises(RunError) as caught:
        RunDirectory(tmp_path, "r").open({**CONFIG, **change}, resume=True)
    assert str(caught.value) == (f"cannot resume {tmp_path / 'r'}: {said}; restore it, or choose another run.name.")


def test_settings_that_do_not_change_the_result_may_change(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path, "r")
    first.open(CONFIG, resume=False)
    first.close()
    changed = {**CONFIG, "run": {**CONFIG["run"], "workers": "auto", "checkpoint_every": 7}}
    again = RunDirectory(tmp_path, "r")
    again.open(changed, resume=True)
    again.close()
    assert tomllib.loads((tmp_path / "r" / "config.toml").read_text())["run"]["workers"] == "auto"


def test_damaged_files_are_named(toys: Any, tmp_path: Path) -> None:
    run(toys.simulation(rounds=4), tmp_path)
    folder = tmp_path / "r"
    metrics = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(metrics[:-5])
    with pytest.raises(RunError, match=r"metrics\.jsonl is shorter than its checkpoint says"):
        run(toys.simulation(rounds=4), tmp_path, resume=True)
    (folder / "metrics.jsonl").write_bytes(b"x" + metrics[1:])
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged"):
        run(toys.simulation(rounds=4), tmp_path, resume=True)
    (folder / "metrics.jsonl").write_bytes(metrics)
    for broken in (b"[run", b"\xff\xff"):
        config = (folder / "config.toml").read_bytes()
        (folder / "config.toml").write_bytes(broken)
        with pytest.raises(RunError, match=r"cannot resume .*r: its config\.toml cannot be read"):
            run(toys.simulation(rounds=4), tmp_path, resume=True)
        (folder / "config.toml").write_bytes(config)
    for path in (folder / "checkpoints").glob("*.json"):
        path.write_bytes(b"{}")
    with pytest.raises(RunError, match="none of the 3 checkpoints"):
        run(toys.simulation(rounds=4), tmp_path, resume=True)


@pytest.mark.parametrize("damage", ["json", "safetensors"])
def test_a_damaged_checkpoint_costs_time_and_nothing_else(toys: Any, tmp_path: Path, damage: str) -> None:
    whole = figures(execute(toys.simulation(rounds=7), CONFIG, facts=FACTS))
    with pytest.raises(KeyboardInterrupt):
        run(toys.simulation(rounds=7), tmp_path, observer=Interrupting(at=5))
    (tmp_path / "r" / "checkpoints" / f"round-000005.{damage}").write_bytes(b"")
    watch = Interrupting(at=-1)
    assert figures(run(toys.simulation(rounds=7), tmp_path, resume=True, observer=watch)) == whole
    assert watch.done == 4


# --- rounds that were all abandoned ------------------------------------------------------------------------------


def refusing(until: int) -> Callable[[ClientInfo], None]:
    def before(client: ClientInfo) -> None:
        if client.round <= until:
            raise PayloadError("battery", "it is empty")

    return before


def test_a_run_whose_every_round_was_abandoned_has_learnt_nothing_and_says_so(toys: Any, tmp_path: Path) -> None:
    def simulation(rounds: int = 3) -> Simulation:
        return toys.simulation(toys.hooked(before=refusing(3)), rounds=rounds)

    first = cohort_of(simulation(), 3)[0]
    said = (
        "every one of the 3 rounds was abandoned, so nothing was learnt; the last one because no reply was accepted "
        f"(client {first}: battery, it is empty)."
    )
    for attempt in (lambda: execute(simulation(), CONFIG, facts=FACTS), lambda: run(simulation(), tmp_path)):
        with pytest.raises(RunError) as caught:
            attempt()
        assert str(caught.value) == said
    folder = tmp_path / "r"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert {path.stem for path in (folder / "checkpoints").glob("*.json")} >= {"round-000000", "round-000003"}
    assert not (folder / "summary.json").exists()
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(RunError, match="every one of the 3 rounds was abandoned"):
        run(simulation(), tmp_path, resume=True)
    # Its clients recover: it goes on from there, and ends like a run that was never stopped.
    watch = Interrupting(at=-1)
    whole = figures(execute(simulation(5), CONFIG, facts=FACTS))
    assert figures(run(simulation(5), tmp_path, resume=True, observer=watch)) == whole
    assert watch.done == 3
    assert whole[1]["abandoned"] == 3


def test_one_round_that_counts_is_enough(toys: Any) -> None:
    made = execute(toys.simulation(toys.hooked(before=refusing(2)), rounds=3), CONFIG, facts=FACTS)
    assert [bool(record.abandoned) for record in made.history] == [True, True, False]
    assert made.summary["rejected_for"] == {"battery": 12}


def test_replies_that_are_too_few_are_named_as_the_reason(toys: Any) -> None:
    def some(client: ClientInfo) -> None:
        if client.id % 2:
            raise PayloadError("battery", "it is empty")

    with pytest.raises(RunError, match=r"the last one because \d replies accepted, 6 needed \(client \d+: battery"):
        execute(toys.simulation(toys.hooked(before=some), min_replies=6), CONFIG, facts=FACTS)


def cohort_of(simulation: Simulation, round: int) -> list[int]:
    return simulation.population.cohort_of(simulation.agreement.round_key(round), round=round)


# --- folders and disks that do not serve -------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made(toys: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(RunError, match=r"cannot write .*file.*r: not a directory"):
            run(toys.simulation(), out)
    (tmp_path / "r").write_bytes(b"")
    with pytest.raises(RunError, match=r"cannot write .*r: (not a directory|file exists)"):
        run(toys.simulation(), tmp_path)


def test_a_folder_that_cannot_be_emptied(toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(toys.simulation(), tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(RunError, match=r"cannot write .*r: permission denied"):
        run(toys.simulation(), tmp_path, overwrite=True)


def test_records_that_cannot_be_written(toys: Any, tmp_path: Path) -> None:
    """A device that is always full, in the place of metrics.jsonl."""
    before = len(list(Path("/proc/self/fd").iterdir()))

    class Filling(Interrupting):
        def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
            (tmp_path / "r" / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: no space left on device"):
        run(toys.simulation(workers=2), tmp_path, observer=Filling(at=-1))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert multiprocessing.active_children() == []
    (tmp_path / "r" / "metrics.jsonl").unlink()
    assert figures(run(toys.simulation(), tmp_path, resume=True)) == figures(
        execute(toys.simulation(), CONFIG, facts=FACTS)
    )


class Disk:
    """Counts the steps that a run takes on the disk, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int = -1) -> None:
        self.steps = 0
        self.fail_at = fail_at
        from laconic.engine import files

        honest = {"fsync": os.fsync, "replace": Path.replace, "write": files.write_all}

        def fsync(handle: int) -> None:
            self.step()
            honest["fsync"](handle)

        def replace(path: Path, target: Path) -> Any:
            self.step()
            return honest["replace"](path, target)

        def write_all(file: Any, data: bytes) -> None:
            honest["write"](file, data[: len(data) // 2])
            self.step()
            honest["write"](file, data[len(data) // 2 :])

        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "replace", replace)
        patch.setattr("laconic.engine.run.write_all", write_all)

    def step(self) -> None:
        if self.steps == self.fail_at:
            self.fail()
        self.steps += 1

    def fail(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_at_any_step(toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, no half-written file under a final name, and a resume that ends like an undisturbed run."""

    def simulation() -> Simulation:
        return toys.simulation(rounds=1)

    whole = figures(execute(simulation(), CONFIG, facts=FACTS))
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        run(simulation(), tmp_path / "whole", checkpoint_every=1)
    assert disk.steps > 20
    for step in range(disk.steps):
        out = tmp_path / str(step)
        with monkeypatch.context() as patch:
            Disk(patch, fail_at=step)
            with pytest.raises(RunError, match=r"^cannot write .*: no space left on device; free some space"):
                run(simulation(), out, checkpoint_every=1)
        for path in (out / "r").rglob("*"):
            assert not path.name.startswith(TEMPORARY)
            check_whole(path)
        assert figures(run(simulation(), out, resume=True)) == whole, f"step {step}"


def test_records_are_synced_before_a_checkpoint_relies_on_them(
    toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        if name in ("metrics.jsonl", "r"):
            steps.append(f"sync {name}")
        fsync(handle)

    def noting_replace(path: Path, target: Path) -> Path:
        if target.suffix == ".json" and target.name != "summary.json":
            steps.append(target.stem)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    run(toys.simulation(rounds=4), tmp_path)
    assert steps == [
        *("sync r", "split", "sync r"),  # config.toml and split.json
        *("round-000000", "sync r"),  # the first checkpoint, the name of metrics.jsonl
        *("sync metrics.jsonl", "round-000002", "sync metrics.jsonl", "round-000004"),
        *("sync r", "sync r"),  # the model and the summary
    ]


def check_whole(path: Path) -> None:
    if path.suffix == ".json":
        json.loads(path.read_bytes())
    elif path.suffix == ".toml":
        assert set(tomllib.loads(path.read_text())) == set(CONFIG)
    elif path.suffix == ".safetensors":
        assert safetensors.torch.load(path.read_bytes())


def test_what_a_killed_process_left_is_cleared_away(toys: Any, tmp_path: Path) -> None:
    run(toys.simulation(), tmp_path)
    stale = tmp_path / "r" / f"{TEMPORARY}123-model.safetensors"
    stale.write_bytes(b"half")
    run(toys.simulation(), tmp_path, resume=True)
    assert not stale.exists()


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


def interrupted_runs(toys: Any) -> Iterator[tuple[str, Callable[..., Simulation]]]:
    def make(before: Callable[[ClientInfo], object] | None = None, **more: Any) -> Simulation:
        return toys.simulation(toys.remembering(before=before), rounds=6, eval_every=3, **more)

    yield "plain", make
    yield "changes", lambda before=None: make(before, up="ef(topk:fraction=0.2)", down="eden:bits=4")


@pytest.mark.parametrize("kind", ["plain", "changes"])
@pytest.mark.parametrize("round", [1, 4, 5])
def test_ctrl_c_in_the_middle_of_a_round(toys: Any, tmp_path: Path, kind: str, round: int) -> None:
    """The last whole round is kept, and nothing of the one that was cut: no state, no bytes."""
    make = dict(interrupted_runs(toys))[kind]
    whole = figures(execute(make(), CONFIG, facts=FACTS))
    trained: list[int] = []

    def press(client: ClientInfo) -> None:
        if client.round == round:
            trained.append(client.id)
            if len(trained) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make(press), tmp_path, checkpoint_every=100)
    watch = Interrupting(at=-1)
    assert figures(run(make(), tmp_path, resume=True, observer=watch)) == whole
    assert watch.done == round - 1


@pytest.mark.parametrize("kind", ["plain", "changes"])
def test_ctrl_c_between_two_rounds(toys: Any, tmp_path: Path, kind: str) -> None:
    make = dict(interrupted_runs(toys))[kind]
    whole = figures(execute(make(), CONFIG, facts=FACTS))
    with pytest.raises(KeyboardInterrupt):
        run(make(), tmp_path, checkpoint_every=100, observer=Interrupting(at=4))
    watch = Interrupting(at=-1)
    assert figures(run(make(), tmp_path, resume=True, observer=watch)) == whole
    assert watch.done == 4


@pytest.mark.parametrize("kind", [ClientStore, DiskStore])
def test_ctrl_c_while_a_round_is_being_kept(
    toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Store]
) -> None:
    """The new server state is there, but not the round's number: such a state must not be saved."""

    def make() -> Simulation:
        simulation: Simulation = dict(interrupted_runs(toys))["plain"]()
        simulation.store = "disk" if kind is DiskStore else "memory"
        return simulation

    whole = figures(execute(make(), CONFIG, facts=FACTS))
    honest = kind.keep
    stored: list[int] = []

    def press(store: Store, client: int, staged: object) -> None:
        stored.append(client)
        # Personal and codec state of six clients in three rounds, and some of the next.
        if len(stored) == 2 * 6 * 3 + 3:
            raise KeyboardInterrupt
        honest(store, client, staged)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "keep", press)
        with pytest.raises(KeyboardInterrupt):
            run(make(), tmp_path, checkpoint_every=2)
    watch = Interrupting(at=-1)
    assert figures(run(make(), tmp_path, resume=True, observer=watch)) == whole
    assert watch.done == 2


def test_ctrl_c_during_an_evaluation(toys: Any, tmp_path: Path) -> None:
    pressed: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and len(target) > 10:  # the common test set
            pressed.append(1)
            if len(pressed) == 2:
                raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target)

    task = Task(lambda: nn.Linear(5, 3), loss=loss)
    with pytest.raises(KeyboardInterrupt):
        run(toys.simulation(task=task, rounds=3), tmp_path)
    made = run(toys.simulation(task=task, rounds=3), tmp_path, resume=True)
    pressed = [1, 1]
    assert figures(made) == figures(execute(toys.simulation(task=task, rounds=3), CONFIG, facts=FACTS))


def test_an_interrupted_run_leaves_no_workers(toys: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        run(toys.simulation(workers=2), tmp_path, observer=Interrupting(at=1))
    assert caught.value.__traceback__ is not None  # it keeps the loop's frame, and must not keep the workers
    assert multiprocessing.active_children() == []
