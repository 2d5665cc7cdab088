"""What is private stays on the device: its names and its values are in no frame."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import laconic.engine.round as exchange
from laconic.codecs import parse
from laconic.core import leaf_bytes
from laconic.engine import Link, Schedule, Simulation, unpack
from laconic.evaluations import EVALUATIONS
from laconic.methods import Autoencoder, KeepLocal, Solver, fedavg, fedopt, fedprox, fedsparse, lg_fedavg, local_only
from laconic.testing import small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)
HOW: dict[str, Any] = {"seed": 0, "workers": 0, "evaluations": EVALUATIONS}
METHODS: dict[str, Any] = {
    "fedavg": KeepLocal(fedavg(solver=SOLVER), ("0.*",)),
    "fedprox": KeepLocal(fedprox(mu=0.1, solver=SOLVER), ("0.*",), start="own"),
    "fedopt": KeepLocal(fedopt(solver=SOLVER), ("3.*",)),
    "fedsparse": KeepLocal(fedsparse(solver=SOLVER), ("3.*",)),
    "phases": lg_fedavg(fedavg_rounds=2, solver=SOLVER),
    "goal": lg_fedavg(goal=1.0, goal_on="test", fedavg_rounds=2, solver=SOLVER),
    "objective": KeepLocal(fedavg(solver=SOLVER), ("0.*",), objective=Autoencoder(hidden=4), solver=SOLVER),
    "alone": local_only(solver=SOLVER),
}


def neighbours(leaf: Tensor) -> set[bytes]:
    """Every two values that lie side by side, as they lie in memory."""
    raw = leaf_bytes(leaf)
    return {raw[i : i + 8] for i in range(0, len(raw) - 7, 4)}


@pytest.mark.parametrize("name", list(METHODS))
def test_no_frame_holds_anything_private(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[bytes] = []
    sealed = exchange._sealed

    def listening(*arguments: Any, **named: Any) -> bytes:
        frame = sealed(*arguments, **named)
        frames.append(frame)
        return frame

    monkeypatch.setattr(exchange, "_sealed", listening)
    # float32 writes values as they lie in memory, so that a value that is sent can be found.
    link = Link(parse("float32"), parse("float32"))
    schedule = Schedule(rounds=5, cohort=4, eval_every=5)
    run = Simulation(METHODS[name], small_task(), small_federation(), link, schedule, **HOW)
    secrets: set[bytes] = set()
    known: set[bytes] = set()
    names: set[str] = set()
    for _ in run:
        for packed in run.state.personal.values():
            for leaf, values in unpack(packed).items():
                names.add(leaf.removeprefix("local/"))
                secrets |= neighbours(values)
        # What no example has moved yet is what the server sent to begin with, and no secret.
        for leaf, values in run.state.server.items():
            if leaf.startswith("local/"):
                known |= neighbours(values)
    secrets -= known
    assert len(secrets) > 100
    assert len(frames) > 20
    for frame in frames:
        assert not any(name.encode() in frame for name in names)
        body = frame[40:]
        windows = {body[i : i + 8] for i in range(len(body) - 7)}
        assert windows.isdisjoint(secrets)


def test_the_search_finds_what_is_sent() -> None:
    """The same search among what is *not* private: the shared leaves of the broadcast are in its frames."""
    link = Link(parse("float32"), parse("float32"))
    schedule = Schedule(rounds=1, cohort=4)
    run = Simulation(METHODS["fedavg"], small_task(), small_federation(), link, schedule, **HOW)
    frame, _ = exchange.send(run.agreement, run.state.server, exchange.to_everyone(1))
    assert leaf_bytes(run.state.server["part/w/3.weight"]) in frame
