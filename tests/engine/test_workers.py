"""Worker processes: order, bounds, deaths, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic.engine.workers as workers_module
from laconic.config import experiment_from, sections
from laconic.core import ClientInfo, ConfigError, DataError, RunError, Task, tree_sha256
from laconic.engine import Agreement, Simulation
from laconic.engine.workers import Failure, InProcess, Job, Processes, Station, open_pool

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Work:
    """A job for tests: sleep, then give a number back, or die."""

    number: int
    seconds: float = 0.0
    die: bool = False
    once: bool = True
    small: bool = True
    bulk: int = 0
    ballast: bytes = b""
    mark: Path | None = None
    done: Path | None = None
    until_done: int = 0

    def run(self, station: Station) -> Any:
        time.sleep(self.seconds)
        if self.done is not None:
            (self.done / str(self.number)).touch()
            until(lambda: len(list(self.done.iterdir())) >= self.until_done)
        if self.die and (self.mark is None or not self.mark.exists()):
            if self.mark is not None:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.number, b"x" * self.bulk


@pytest.fixture
def pool(toys: Any) -> Iterator[Callable[[int], Processes]]:
    pools: list[Processes] = []

    def make(workers: int) -> Processes:
        simulation = toys.simulation()
        pools.append(Processes(simulation.agreement, simulation.clients, workers))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def numbers(results: Iterator[Any]) -> list[Any]:
    return [result[0] if isinstance(result[0], int) else result.reason for result in results]


def children() -> list[int]:
    """Processes whose parent we are, zombies included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == os.getpid():
                found.append(int(folder.name))
    return found


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- order and bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_jobs(pool: Any, workers: int) -> None:
    jobs = [Work(i, seconds=0.003 * ((i * 7) % 5)) for i in range(23)]
    assert numbers(pool(workers).map(iter(jobs), count=23)) == list(range(23))


def test_a_slow_first_job_bounds_what_waits(pool: Any, tmp_path: Path) -> None:
    """While the oldest job is under way, later ones are done, but only so many are taken up."""
    drawn: list[int] = []
    given: list[int] = []

    def jobs() -> Iterator[Job]:
        for i in range(60):
            drawn.append(i)
            assert len(drawn) - len(given) <= 16
            # The first waits until all are done that can be: not itself, and not the one behind it in the pipe.
            yield Work(i, done=tmp_path, until_done=15 if i == 0 else 0)

    for result in pool(2).map(jobs(), count=60):
        if not given:
            assert len(drawn) == 16, "eight jobs per worker"
        given.append(result[0])
    assert given == list(range(60))


@pytest.mark.parametrize("small", [True, False])
def test_large_jobs_and_large_results_do_not_block_each_other(pool: Any, small: bool) -> None:
    """More than a pipe holds, both ways."""
    size = 1 << 20
    jobs = [Work(i, small=small, bulk=size, ballast=b"" if small else b"y" * size) for i in range(12)]
    assert numbers(pool(2).map(iter(jobs), count=12)) == list(range(12))


def test_values_are_shared_with_all_workers_and_with_those_that_come_later(pool: Any) -> None:
    workers = pool(2)
    workers.share(frame=b"one")
    assert list(workers.map(iter([Tell() for _ in range(6)]), count=6)) == [b"one"] * 6
    workers.share(frame=b"x" * (1 << 20))
    numbers(workers.map(iter([Work(0, die=True)]), count=1))
    assert {len(result) for result in workers.map(iter([Tell() for _ in range(6)]), count=6)} == {1 << 20}


@dataclass(frozen=True)
class Tell:
    once = True
    small = True

    def run(self, station: Station) -> bytes:
        return station.shared["frame"]


def test_torch_has_one_thread_in_a_worker(pool: Any) -> None:
    assert list(pool(1).map(iter([Threads()]), count=1)) == [1]


@dataclass(frozen=True)
class Threads:
    once = True
    small = True

    def run(self, station: Station) -> int:
        return torch.get_num_threads()


# --- deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "dying"), [(1, {0}), (1, {4, 5}), (2, {3, 4}), (2, {0, 1, 11}), (3, {0, 1, 2, 3}), (2, set(range(12)))]
)
def test_a_worker_that_dies_costs_the_job_that_it_was_at(pool: Any, workers: int, dying: set[int]) -> None:
    """Also where another job was waiting in its pipe already: that one is done by its successor."""
    jobs = [Work(i, die=i in dying, seconds=0.002) for i in range(12)]
    results = numbers(pool(workers).map(iter(jobs), count=12))
    assert results == ["worker_died" if i in dying else i for i in range(12)]


def test_the_failure_says_how_the_worker_ended(pool: Any) -> None:
    (failure,) = pool(1).map(iter([Work(0, die=True)]), count=1)
    assert failure == Failure("worker_died", "its worker process ended with code -9")


def test_workers_that_died_while_idle_are_replaced(pool: Any) -> None:
    workers = pool(2)
    for sharing in (True, False):
        for worker in workers._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
        if sharing:
            workers.share(frame=b"one")
        assert numbers(workers.map(iter([Work(i) for i in range(4)]), count=4)) == [0, 1, 2, 3]


def test_a_worker_that_cannot_be_woken_is_ended_all_the_same(pool: Any) -> None:
    workers = pool(1)
    os.kill(workers._workers[0].process.pid, signal.SIGSTOP)
    began = time.monotonic()
    workers.close()
    assert time.monotonic() - began < 10


def test_evaluations_are_begun_again_when_a_worker_dies(pool: Any, tmp_path: Path) -> None:
    jobs = [Work(i, once=False, die=i == 2, mark=tmp_path / "died") for i in range(6)]
    assert numbers(pool(2).map(iter(jobs), count=6)) == list(range(6))


def test_an_evaluation_that_kills_every_worker_ends_the_run(pool: Any) -> None:
    jobs = [Work(i, once=False, die=i == 2) for i in range(6)]
    with pytest.raises(RunError, match=r"3 worker processes died over one job \(the last with code -9\)"):
        numbers(pool(2).map(iter(jobs), count=6))


def cohort_of(simulation: Simulation) -> list[int]:
    return simulation.population.cohort_of(simulation.agreement.round_key(1), round=1)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_killed_client_is_as_good_as_one_that_raised(toys: Any, workers: int) -> None:
    """The run goes on, with the same result as if these clients had raised an error."""
    bad = set(cohort_of(toys.simulation())[1:4:2])

    def die(client: ClientInfo) -> None:
        if client.id in bad:
            os.kill(os.getpid(), signal.SIGKILL)

    def fail(client: ClientInfo) -> None:
        if client.id in bad:
            raise ValueError("no power")

    killed = toys.simulation(toys.hooked(before=die), rounds=3, workers=workers)
    failed = toys.simulation(toys.hooked(before=fail), rounds=3, workers=1)
    records, others = list(killed), list(failed)
    assert tree_sha256(killed.state.server) == tree_sha256(failed.state.server)
    assert {r["client"] for r in records[0]["rejections"]} == bad
    assert {(r["reason"], r["detail"], r["round"]) for r in records[0]["rejections"]} == {
        ("worker_died", "its worker process ended with code -9", 1)
    }
    timeless = [[replace(record, rejections=(), seconds=0.0) for record in some] for some in (records, others)]
    assert timeless[0] == timeless[1]


def test_a_mistake_in_the_settings_ends_the_run(toys: Any) -> None:
    """It would meet every client. An error of one client's data costs that client's reply."""

    def misuse(client: ClientInfo) -> None:
        raise ConfigError("that does not go together.")

    def lost(client: ClientInfo) -> None:
        if client.id == 1:
            raise DataError("the folder is gone.")

    records = list(toys.simulation(toys.hooked(before=lost), rounds=3, workers=1))
    assert {(r["client"], r["reason"]) for record in records for r in record.get("rejections", ())} == {
        (1, "client_error")
    }
    for workers in (0, 2):
        with pytest.raises(ConfigError, match=r"^that does not go together\.$"):
            list(toys.simulation(toys.hooked(before=misuse), workers=workers))
    assert multiprocessing.active_children() == []


# --- nothing is left ---------------------------------------------------------------------------------------------


def test_runs_leave_no_process_and_no_descriptor(toys: Any) -> None:
    def die_sometimes(client: ClientInfo) -> None:
        if client.id % 5 == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def once() -> None:
        list(toys.simulation(toys.hooked(before=die_sometimes), rounds=3, workers=3))

    once()
    gc.collect()
    before = descriptors(), children()
    for _ in range(3):
        once()
    gc.collect()
    assert (descriptors(), children()) == before


def test_a_run_that_is_given_up_leaves_no_process(toys: Any) -> None:
    before = descriptors(), children()
    with closing(iter(toys.simulation(rounds=100, workers=2))) as records:
        next(records)
        assert len(children()) == len(before[1]) + 2
    gc.collect()
    assert (descriptors(), children()) == before


def test_workers_end_when_their_parent_is_killed(toys: Any, fork: Any, tmp_path: Path) -> None:
    """They hold no copy of each other's pipes: nobody stays waiting for a parent that is gone."""

    def parent() -> None:
        simulation = toys.simulation()
        pool = Processes(simulation.agreement, simulation.clients, 3)
        pids = " ".join(str(worker.process.pid) for worker in pool._workers)
        (tmp_path / "part").write_text(pids)
        (tmp_path / "part").rename(tmp_path / "pids")
        time.sleep(60)

    child = fork(parent)
    until(lambda: (tmp_path / "pids").exists())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert all(map(alive, pids))
    child.kill()
    assert child.wait() == -signal.SIGKILL
    until(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# --- which pool --------------------------------------------------------------------------------------------------


def test_workers_need_the_cpu(toys: Any) -> None:
    agreement: Agreement = toys.simulation().agreement
    method = toys.hooked().bind(Task(lambda: torch.nn.Linear(5, 3), device="meta"))
    elsewhere = replace(agreement, method=method)
    with pytest.raises(
        ConfigError, match=r"workers = 2 needs a system with fork and device = 'cpu', or .*; set workers = 0\.$"
    ):
        open_pool(elsewhere, toys.federation(), workers=2, most=2)
    for workers in (0, "auto"):
        assert isinstance(open_pool(elsewhere, toys.federation(), workers=workers, most=2), InProcess)


def test_auto_is_one_worker_per_core(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    simulation = toys.simulation()
    with closing(open_pool(simulation.agreement, simulation.clients, workers="auto", most=99)) as pool:
        assert isinstance(pool, Processes)
        assert len(pool._workers) == 3


def test_no_more_workers_than_clients_to_train(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "cores", lambda: 64)
    agreement = toys.simulation().agreement
    pool = workers_module.open_pool(agreement, toys.simulation().clients, workers="auto", most=2)
    try:
        assert len(pool._workers) == 2
    finally:
        pool.close()


def test_without_fork_auto_means_no_workers(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "cores", lambda: 64)
    monkeypatch.setattr(workers_module.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    agreement = toys.simulation().agreement
    pool = workers_module.open_pool(agreement, toys.simulation().clients, workers="auto", most=2)
    assert isinstance(pool, workers_module.InProcess)


# --- devices other than the CPU ----------------------------------------------------------------------------------


def table(**run: Any) -> dict[str, Any]:
    """A run on "cpu:1": the same processor under the name of another device."""
    settings = {"rounds": 2, "cohort": 4, "eval_every": 1, "device": "cpu:1", "workers": 2, **run}
    method = {"name": "scaffold", "local_epochs": 1, "lr": 0.1}
    return sections({"run": settings, "data": {"clients": 6}, "method": method}, where="here")


def test_workers_of_another_device_are_spawned_and_give_the_same_bits() -> None:
    found = experiment_from(table()).simulation
    with closing(found.carrier(found)) as pool:
        assert isinstance(pool, Processes)
        assert {type(worker.process).__name__ for worker in pool._workers} == {"SpawnProcess"}
    summaries = [experiment_from(table(**how)).run().summary for how in ({}, {"device": "cpu", "workers": 0})]
    for name in ("state_sha256", "bytes_up", "global_accuracy", "local_accuracy", "rejected"):
        assert summaries[0][name] == summaries[1][name]


def nowhere() -> Any:
    raise ConfigError("there are no data here.")


def test_a_spawned_worker_that_cannot_make_the_run_says_why() -> None:
    made = experiment_from(table())
    made.simulation.anew = nowhere
    with pytest.raises(ConfigError, match=r"^there are no data here\.$"):
        made.run()
