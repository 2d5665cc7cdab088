"""Three nodes on this machine: the same bits as the embedded engine, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.cluster.conftest import Nodes
from tests.flower.conftest import METHODS, table_for

from laconic.cluster import Cluster, Identity, Machines, on_cluster
from laconic.comparison import compare_tables
from laconic.config import experiment_from, sections
from laconic.core import DataError, RunError
from laconic.engine import Run

pytestmark = [
    pytest.mark.slow,
    # Ray's own: sockets and files that its processes leave to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
SAME = ("state_sha256", "bytes_up", "bytes_down", "global_accuracy", "local_accuracy", "rejected")


def table(name: str, *, rounds: int = 3, **run: Any) -> dict[str, dict[str, Any]]:
    made = table_for(name, rounds=rounds, clients=9, **run)
    return sections({key: value for key, value in made.items() if value}, where=name)


def check_same(run: Run, name: str, **options: Any) -> None:
    embedded = experiment_from(table(name, **options)).run()
    assert {key: run.summary[key] for key in SAME} == {key: embedded.summary[key] for key in SAME}
    assert [record.traffic["replies"] for record in run.history] == [9] * len(run.history)


class Meddler:
    """An observer that does something once a round is over, while the next one runs."""

    def __init__(self, after: int, act: Callable[[], object]) -> None:
        self._after, self._act = after, act

    def started(self, **_: object) -> None: ...

    def advanced(self, record: Any) -> None:
        if record.round == self._after:
            self._act()

    def finished(self, _: object) -> None: ...


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Machines]:
    """The pools that runs open, with `meddle` called when so many results of a round have come."""
    made: list[Machines] = []
    begin = Machines.__init__

    def remember(self: Machines, *args: Any) -> None:
        made.append(self)
        begin(self, *args)

    monkeypatch.setattr(Machines, "__init__", remember)
    return made


Strike = Callable[[Callable[[Any, int], object]], None]


@pytest.fixture
def in_mid_round(monkeypatch: pytest.MonkeyPatch) -> Strike:
    """Stop an actor (of a node that is not the head) when the first result of the second round has come, then strike.

    It has been given another job just then, which it cannot finish.
    """
    through = Machines.map

    def arrange(strike: Callable[[Any, int], object]) -> None:
        import ray

        calls = {"n": 0}
        head = ray.get_runtime_context().get_node_id()

        def meddling(self: Machines, jobs: Any, *, count: int) -> Iterator[Any]:
            calls["n"] += 1
            now = calls["n"] == 2
            if now:
                victim = next(actor for actor in self._ready() if actor.place.node != head)
                pid = ray.get(victim.handle.__ray_call__.remote(lambda _: os.getpid()))
            for number, result in enumerate(through(self, jobs, count=count)):
                if now and number == 0:
                    os.kill(pid, signal.SIGSTOP)
                    assert victim.busy
                    strike(victim, pid)
                yield result

        monkeypatch.setattr(Machines, "map", meddling)

    return arrange


@pytest.mark.parametrize("name", [*METHODS, "vardrop", "feddrop", "mtl"])
def test_a_method_gives_the_bits_of_the_embedded_engine(nodes: Nodes, name: str) -> None:
    check_same(on_cluster(table(name), Cluster()), name)


def test_all_three_machines_take_part(nodes: Nodes, pools: list[Machines]) -> None:
    seen: list[int] = []
    on_cluster(table("fedavg"), Cluster(), observer=Meddler(2, lambda: seen.append(len(pools[0]._ready()))))  # type: ignore[arg-type]
    assert seen == [3]


def test_a_run_from_objects_is_sent_whole(nodes: Nodes) -> None:
    check_same(on_cluster(experiment_from(table("fedsparse")), Cluster()), "fedsparse")


FIVE = ["fedavg", "fedsparse", "fedpm", "lg_fedavg", "vardrop"]


def retries(run: Run) -> int:
    return sum(record.traffic.get("retries", 0) for record in run.history)


@pytest.mark.parametrize("name", [*FIVE, "eden"])
def test_an_actor_that_is_killed_costs_a_retry(nodes: Nodes, name: str, in_mid_round: Strike) -> None:
    in_mid_round(lambda actor, pid: os.kill(pid, signal.SIGKILL))
    run = on_cluster(table(name), Cluster())
    check_same(run, name)
    assert retries(run) > 0


def test_an_actor_that_ray_kills_costs_a_retry(nodes: Nodes, in_mid_round: Strike) -> None:
    import ray

    def strike(actor: Any, pid: int) -> None:
        ray.kill(actor.handle)
        os.kill(pid, signal.SIGCONT)

    in_mid_round(strike)
    run = on_cluster(table("eden"), Cluster())
    check_same(run, "eden")
    assert retries(run) > 0


@pytest.mark.parametrize("name", [*FIVE, "eden"])
def test_a_machine_that_is_killed_costs_a_retry(nodes: Nodes, name: str, in_mid_round: Strike) -> None:
    def strike(actor: Any, pid: int) -> None:
        nodes.kill(actor.place.node)
        with suppress(ProcessLookupError):  # stopped, it cannot see that its machine is gone
            os.kill(pid, signal.SIGKILL)

    in_mid_round(strike)
    try:
        run = on_cluster(table(name), Cluster())
    finally:
        nodes.add()
        nodes.cluster.wait_for_nodes()
    check_same(run, name)
    assert retries(run) > 0


@pytest.mark.parametrize("name", ["eden", "vardrop"])
def test_a_worker_that_is_killed_costs_a_retry(nodes: Nodes, name: str, in_mid_round: Strike) -> None:
    import ray

    def strike(actor: Any, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)
        pids = actor.handle.__ray_call__.remote(lambda self: [w.process.pid for s in self._slots for w in s._workers])
        for worker in ray.get(pids):
            os.kill(worker, signal.SIGKILL)

    in_mid_round(strike)
    check_same(on_cluster(table(name), Cluster()), name)


def test_a_machine_that_joins_is_taken_in(nodes: Nodes, pools: list[Machines]) -> None:
    seen: list[int] = []

    class Watch(Meddler):
        def advanced(self, record: Any) -> None:
            super().advanced(record)
            seen.append(len(pools[0]._ready()))
            if seen[-1] < 4:
                time.sleep(0.5)  # a machine needs seconds to begin, a round of this run hardly any time

    run = on_cluster(table("fedavg", rounds=60), Cluster(), observer=Watch(3, nodes.add))  # type: ignore[arg-type]
    check_same(run, "fedavg", rounds=60)
    assert (seen[0], seen[-1]) == (3, 4)


def test_ten_thousand_clients_of_sixty_examples(nodes: Nodes) -> None:
    made = sections(
        {
            "run": {"rounds": 2, "cohort": 200, "eval_every": 2, "evaluations": ["global"]},
            "data": {"source": f"{__name__}:many"},
            "model": {"name": "mlp", "hidden": [16]},
        },
        where="many",
    )
    assert on_cluster(made, Cluster()).summary["state_sha256"] == experiment_from(made).run().summary["state_sha256"]


def many() -> Any:
    import numpy as np

    from laconic.data import Federation

    rng = np.random.default_rng(0)
    x = rng.random((600_000, 20), dtype=np.float32)
    y = (x @ rng.random((20, 10), dtype=np.float32)).argmax(1)
    return Federation.from_arrays((x, y), (x[:1000], y[:1000]), clients=10_000)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_comparison_outlives_a_machine(nodes: Nodes, tmp_path: Path) -> None:
    """Three runs on three machines, one of which is killed: its run goes on from a checkpoint elsewhere."""
    tables = [(name, table(name, rounds=60, checkpoint_every=3)) for name in ("fedavg", "eden", "fedpm")]

    def going() -> bool:
        files = [tmp_path / "there" / f"{name}-s0" / "checkpoints" for name, _ in tables]
        return all(list(file.glob("*.json")) for file in files)

    def kill() -> None:
        while not going():
            time.sleep(0.05)
        nodes.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        there = compare_tables(tables, out=tmp_path / "there", seeds=1, progress=False, cluster=Cluster())
    finally:
        killer.join(60)
        nodes.add()
        nodes.cluster.wait_for_nodes()
    here = compare_tables(tables, out=tmp_path / "here", seeds=1, progress=False)
    assert not there.failures
    for name, _ in tables:
        ours, theirs = (found.runs[name][0].summary or {} for found in (here, there))
        assert [ours[key] for key in SAME] == [theirs[key] for key in SAME]


def test_a_command_joins_by_address(nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({key: value for key, value in table_for("fedavg", clients=9).items() if value}))
    words = ["run", str(file), "--out", str(tmp_path), "--engine", "ray", "--address", nodes.cluster.address]
    command = [sys.executable, "-c", "from laconic.cli import main; main()", *words, "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "fedavg" / "summary.json").read_text())
    embedded = experiment_from(table("fedavg")).run().summary
    assert [summary[key] for key in SAME] == [embedded[key] for key in SAME]


# --- machines that cannot take part ----------------------------------------------------------------------------------


def test_another_laconic_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Identity.of

    def other(*args: Any) -> Identity:
        made = here(*args)
        return made._replace(versions={**made.versions, "laconic": "0.0.9"})

    monkeypatch.setattr(Identity, "of", other)
    with pytest.raises(RunError, match=r"machine .* has laconic 0\.1\.0 \(.*\), but this one has 0\.0\.9; install"):
        on_cluster(table("fedavg"), Cluster())


def test_no_laconic_at_all_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "laconic_of_tomorrow.py").write_text("class Machine:\n    def open(self, *_): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    from laconic_of_tomorrow import Machine  # type: ignore[import-not-found]

    monkeypatch.setattr("laconic.cluster.pool.Machine", Machine)
    (tmp_path / "laconic_of_tomorrow.py").unlink()
    with pytest.raises(RunError, match=r"machine .* has no laconic like this one; install the same on all\."):
        on_cluster(table("fedavg"), Cluster())


def test_other_data_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.cluster.machine._glance", lambda clients: "something else")
    with pytest.raises(RunError, match=r"machine .* has other data than this one"):
        on_cluster(table("fedavg"), Cluster())


def only_here() -> Any:
    from laconic.data import digits

    if os.environ.get("LACONIC_TEST_DRIVER") != str(os.getpid()):
        raise DataError("the folder /data/mnist is not there.")
    return digits(clients=9)


def test_no_data_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_TEST_DRIVER", str(os.getpid()))
    made = {**table("fedavg"), "data": {"source": f"{__name__}:only_here"}}
    with pytest.raises(DataError, match=r"machine .* has no such data: the folder /data/mnist is not there"):
        on_cluster(made, Cluster())


def test_a_folder_that_is_not_shared_is_refused(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "touch", lambda *_: None)  # what nobody has made, nobody sees
    with pytest.raises(RunError, match=r"machine 127\.0\.0\.1 does not see .*; runs leave their files there"):
        compare_tables([("a", table("fedavg"))], out=tmp_path, seeds=1, progress=False, cluster=Cluster())


def test_a_cluster_without_room_is_refused(nodes: Nodes) -> None:
    with pytest.raises(RunError, match=r"no machine of the cluster has 64 CPUs free"):
        on_cluster(table("fedavg"), Cluster(cpus_per_client=64))
