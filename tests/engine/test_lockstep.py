"""Clients that march in step: what they hold advances with every frame, whoever computes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from laconic.codecs import parse
from laconic.core import ClientInfo, Tree, Update, tree_sha256
from laconic.engine import Link, Schedule, Simulation, send, to_everyone
from laconic.engine.workers import Processes
from laconic.methods import Solver, Synchronous
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(optimizer="adam", lr=1e-2, local_steps=1, batch_size=4)
FLOAT32 = parse("float32")


@dataclass(frozen=True)
class Mortal(Synchronous):
    """A device whose worker dies in a round."""

    dies: int = 0
    home: int = 0

    def client_update(self, received: Tree, *args: Any) -> Update:
        client: ClientInfo = args[2]
        if client.round == self.dies and client.id == 1:
            if os.getpid() != self.home:
                os._exit(3)
            raise RuntimeError("the worker would die here")
        return Synchronous.client_update(self, received, *args)


def _run(method: Synchronous, *, workers: int, rounds: int = 5, down: str = "float32") -> Simulation:
    schedule = Schedule(rounds=rounds, cohort=4, workers=workers, eval_every=2)
    return Simulation(method, small_task(), small_federation(clients=4), Link(FLOAT32, parse(down)), schedule, seed=2)


@pytest.mark.parametrize("down", ["float32", "qsgd:levels=4"])
def test_a_worker_that_is_replaced_holds_what_the_others_hold(down: str) -> None:
    ends = []
    for workers in (0, 2):
        run = _run(Mortal(solver=SOLVER, dies=3, home=os.getpid(), check_every=1), workers=workers, down=down)
        records = list(run)
        assert [[x["client"] for x in r.get("rejections", [])] for r in records] == [[], [], [1], [], []]
        ends.append((tree_sha256(run.state.server), run.state.ledger.bytes_up, dict(run.state.personal)))
    assert ends[0] == ends[1]


def test_what_clients_hold_is_sent_to_a_worker_once() -> None:
    run = _run(Synchronous(solver=SOLVER), workers=0)
    pool = Processes(run.agreement, run.clients, 1)
    sizes: list[int] = []
    try:
        pipe = pool._workers[0].pipe
        real = pipe.send_bytes
        pipe.send_bytes = lambda packed: (sizes.append(len(packed)), real(packed))[1]  # type: ignore[method-assign]
        for number in range(3):
            pool.share(frame=b"f", round=bytes([number + 1, 0, 0, 0]), known=b"k" * 10_000)
        assert sizes[0] > 10_000
        assert max(sizes[1:]) < 1000
    finally:
        pool.close()


def test_a_round_that_is_abandoned_is_no_step() -> None:
    """The frame of the next round brings the same step again, which changes nothing for whoever took it."""

    class Fails(Synchronous):
        def client_update(self, received: Tree, *args: Any) -> Update:
            if args[2].round == 3:
                raise RuntimeError("nobody answers")
            return Synchronous.client_update(self, received, *args)

    run = _run(Fails(solver=SOLVER), workers=0, rounds=4)
    steps = []
    for record in run:
        assert run.state.downlink is not None
        steps.append(int(run.state.downlink.known["#step"][0]))
        assert ("abandoned" in record) == (record["round"] == 3)
    assert steps == [0, 1, 2, 2]
    assert int(run.state.server["sent/#step"][0]) == 3


def test_a_client_that_missed_a_frame_is_charged_for_it() -> None:
    run = _run(Synchronous(solver=SOLVER), workers=0)
    down = run.state.downlink
    assert down is not None
    frame, known = send(run.agreement, run.state.server, to_everyone(1), down.known)
    assert down.costs(len(frame), range(4)) == 4 * [len(frame)]
    assert torch.equal(known["w/0.weight"], down.known["w/0.weight"])  # nothing has been learnt yet


def test_check_method_sees_a_step_that_counts_twice() -> None:
    class Careless(Synchronous):
        def absorb(self, held: Tree, sent: Tree) -> Tree:
            return {**held, "#step": held["#step"] + 1}

    with pytest.raises(AssertionError, match="absorbed twice"):
        check_method(Careless(solver=SOLVER), workers=0)
