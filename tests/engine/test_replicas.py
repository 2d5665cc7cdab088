"""Clients that hold replicas of one tree: it advances with every frame, whoever computes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import laconic as lc
from laconic.codecs import parse
from laconic.core import (
    ALONE,
    Bound,
    ClientData,
    ClientInfo,
    Key,
    Method,
    PayloadError,
    Population,
    Task,
    Tree,
    Update,
    tree_sha256,
)
from laconic.engine import Link, Schedule, Simulation, send, to_everyone
from laconic.engine.workers import Processes
from laconic.testing import check_method, small_federation, small_task

SOLVER = lc.Solver(optimizer="adam", lr=1e-2, local_steps=1, batch_size=4)
FLOAT32 = parse("float32")


def vardrop(**changes: Any) -> Method:
    return lc.vardrop(solver=SOLVER, **changes)


def mortal(*, dies: int) -> Method:
    """A client whose worker dies in a round, or which refuses where there is no worker."""
    home = os.getpid()

    def act(client: ClientInfo) -> None:
        if client.round == dies and client.id == 1:
            if os.getpid() != home:
                os._exit(3)
            raise PayloadError("died", "the worker would die here")

    return hooked(vardrop(check_every=1), act)


def hooked(method: Method, act: Callable[[ClientInfo], object]) -> Method:
    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = method.bind(task, population)

        def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
            act(client)
            return bound.client_update(received, personal, data, client, key)

        return replace(bound, client_update=client_update)

    return replace(method, bind=bind)


def _run(method: Method, *, workers: int, rounds: int = 5, down: str = "float32") -> Simulation:
    schedule = Schedule(rounds=rounds, cohort=4, eval_every=2)
    link = Link(FLOAT32, parse(down))
    return Simulation(method, small_task(), small_federation(clients=4), link, schedule, seed=2, workers=workers)


@pytest.mark.parametrize("down", ["float32", "qsgd:levels=4"])
def test_a_worker_that_is_replaced_holds_what_the_others_hold(down: str) -> None:
    ends = []
    for workers in (0, 2):
        run = _run(mortal(dies=3), workers=workers, down=down)
        records = list(run)
        assert [[x["client"] for x in r.get("rejections", [])] for r in records] == [[], [], [1], [], []]
        ends.append((tree_sha256(run.state.server), run.state.ledger.bytes_up, dict(run.state.personal)))
    assert ends[0] == ends[1]


def test_what_clients_hold_is_sent_to_a_worker_once() -> None:
    run = _run(vardrop(), workers=0)
    pool = Processes(run.agreement, run.clients, 1)
    sizes: list[int] = []
    try:
        pipe = pool._workers[0].pipe
        real = pipe.send_bytes
        pipe.send_bytes = lambda packed: (sizes.append(len(packed)), real(packed))[1]  # type: ignore[method-assign]
        for number in range(3):
            pool.share(frame=b"f", round=bytes([number + 1, 0, 0, 0]), held=b"k" * 10_000)
        assert sizes[0] > 10_000
        assert max(sizes[1:]) < 1000
    finally:
        pool.close()


def test_a_round_that_is_abandoned_is_no_step() -> None:
    """The frame of the next round brings the same step again, which changes nothing for whoever took it."""

    def fail(client: ClientInfo) -> None:
        if client.round == 3:
            raise PayloadError("gone", "nobody answers")

    run = _run(hooked(vardrop(), fail), workers=0, rounds=4)
    steps = []
    for record in run:
        assert run.state.downlink is not None
        steps.append(int(run.state.downlink.held["#step"][0]))
        assert ("abandoned" in record) == (record["round"] == 3)
    assert steps == [0, 1, 2, 2]
    assert int(run.state.server["sent/#step"][0]) == 3


def test_a_client_that_missed_a_frame_is_charged_for_it() -> None:
    run = _run(vardrop(), workers=0)
    down = run.state.downlink
    assert down is not None
    frame, (known, _) = send(run.agreement, run.state.server, to_everyone(1), down.held)
    assert down.costs(len(frame), range(4)) == 4 * [len(frame)]
    assert torch.equal(known["w/0.weight"], down.held["w/0.weight"])  # nothing has been learnt yet


def test_check_method_sees_a_step_that_counts_twice() -> None:
    def absorb(held: Tree, sent: Tree) -> Tree:
        return {**held, "#step": held["#step"] + 1}

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = vardrop().bind(task, population)
        assert bound.replica is not None
        return replace(bound, replica=bound.replica._replace(absorb=absorb))

    with pytest.raises(AssertionError, match="absorbed twice"):
        check_method(replace(vardrop(), bind=bind), workers=0)
