"""Law 6: one bad client costs that client's reply, not the round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import laconic as lc
from laconic.codecs import float32, mask
from laconic.core import (
    ClientData,
    Codec,
    Method,
    Part,
    PayloadError,
    Shared,
    Spec,
    Tree,
    leaf_bytes,
    subtree,
    tree_sha256,
)
from laconic.engine import Link, Record, Run, Schedule, Simulation
from laconic.evaluations import EVALUATIONS
from laconic.methods import methods
from laconic.testing import Byzantine, scaled, small_federation, small_task, with_nan

SHORT = {"lr": 0.1, "local_epochs": 1, "batch_size": 10}
FEDERATION = small_federation()
ROUNDS = 2


def run(
    method: Method, *, clients: Any = FEDERATION, up: Codec | None = None, rounds: int = ROUNDS, workers: int = 0
) -> tuple[str, list[Record]]:
    schedule = Schedule(rounds=rounds, cohort=clients.num_clients, min_replies=1)
    link = Link(up or float32(), float32())
    how: dict[str, Any] = {"seed": 0, "workers": workers, "evaluations": EVALUATIONS}
    simulation = Simulation(method, small_task(), clients, link, schedule, **how)
    records = list(simulation)
    return tree_sha256(simulation.state.server), records


def rejections(records: list[Record]) -> list[tuple[int, str]]:
    return [(r["client"], r["reason"]) for record in records for r in record.get("rejections", [])]


# --- lies ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> lc.Federation:
    return lc.data.digits(clients=10)


def accuracy(digits: lc.Federation, name: str, liars: set[int]) -> float:
    method = Byzantine(methods.build(name, SHORT), liars, scaled(-100))
    # Without the bound that runs have by default: what a method stands by itself.
    ended: Run = lc.fit(method=method, data=digits, rounds=12, cohort=10, workers=0, eval_every=12, max_norm="off")
    assert ended.history[0]["rejected"] == 0  # a lie is a proper message
    return float(ended.summary["global_accuracy"])


def test_the_median_stands_2_liars_of_10_where_the_mean_falls(digits: lc.Federation) -> None:
    honest = accuracy(digits, "fedmedian", set())
    assert honest > 0.87
    assert accuracy(digits, "fedmedian", {3, 7}) > honest - 0.02
    assert accuracy(digits, "fedavg", set()) > 0.87
    assert accuracy(digits, "fedavg", {3, 7}) < 0.25


# --- failures --------------------------------------------------------------------------------------------------------


def fail(message: Tree) -> Tree:
    raise PayloadError("failed", "this client fails")


class Without:
    """A federation that never had its last client."""

    num_clients, test, validation = FEDERATION.num_clients - 1, FEDERATION.test, FEDERATION.validation
    newcomer = None

    def client(self, client: int) -> ClientData:
        return FEDERATION.client(client)


MASKS = {"fedpm", "fedmask"}
ONLY_BITS = {"fedmask"}  # whose clients send nothing that could be no number


class Poor(Without):
    """A federation one of whose clients has nothing to train on."""

    num_clients = FEDERATION.num_clients

    def __init__(self, poor: int) -> None:
        self.poor = poor

    def client(self, client: int) -> ClientData:
        data = FEDERATION.client(client)
        nothing = Part(data.train.x, data.train.y, torch.from_numpy(np.zeros(0, dtype=np.int64)))
        return ClientData(nothing, data.test) if client == self.poor else data


NOTHING = {"local_only"}  # whose clients send nothing at all
COUNTING = {"scaffold", "feddyn"}  # whose server knows how many clients there are, whether they reply or not


@pytest.mark.parametrize("name", [name for name in methods if name not in ONLY_BITS | NOTHING])
def test_a_nan_is_refused_and_the_run_is_the_one_without_that_client(name: str) -> None:
    method = methods.build(name, SHORT)
    for bad in (0, 5):
        spoilt, records = run(Byzantine(method, {bad}, with_nan))
        assert rejections(records) == [(bad, "non_finite")] * ROUNDS
        assert [(r["replies"], r["rejected"]) for r in records] == [(5, 1)] * ROUNDS
        failed, other = run(Byzantine(method, {bad}, fail))
        assert rejections(other) == [(bad, "failed")] * ROUNDS
        assert spoilt == failed
    # And where the last client never was, nothing else changes either: keys go by a client's own number.
    without = run(method, clients=Without())[0]
    assert (without == spoilt) == (name not in COUNTING)
    assert run(method, clients=Poor(5))[0] == spoilt
    assert run(method)[0] != spoilt


@pytest.mark.parametrize("name", sorted(MASKS))
def test_liars_about_bits_are_one_vote_each(name: str) -> None:
    """Whatever a liar sends is a mask, and moves a count by one at the most."""
    method = methods.build(name, {**SHORT, "local_steps": 2})
    counts = []
    for lie in (torch.zeros_like, torch.ones_like):
        flipped = Byzantine(method, {1}, lambda message, lie=lie: {name: lie(leaf) for name, leaf in message.items()})
        schedule = Schedule(rounds=1, cohort=FEDERATION.num_clients)
        simulation = Simulation(flipped, small_task(), FEDERATION, Link(mask(), mask()), schedule, seed=0, workers=0)
        assert [record["rejected"] for record in simulation] == [0]
        counts.append(torch.cat([leaf.flatten() for leaf in subtree("ones", simulation.state.server).values()]))
    assert int((counts[0] - counts[1]).abs().min()) == int((counts[0] - counts[1]).abs().max()) == 1


@pytest.mark.parametrize("name", sorted(MASKS))
def test_a_mask_that_is_cut_costs_that_clients_reply(name: str) -> None:
    method = methods.build(name, SHORT)

    def longer(message: Tree) -> Tree:
        return {leaf: torch.cat([bits, bits]) for leaf, bits in message.items()}

    # Without workers, a mistake that its own sender makes would end the run.
    spoilt, records = run(Byzantine(method, {1}, longer), up=mask(), workers=1)
    assert [client for client, _ in rejections(records)] == [1] * ROUNDS
    assert spoilt == run(Byzantine(method, {1}, fail), up=mask())[0]


@pytest.mark.parametrize("bad", [{1, 2}, {0, 1, 2, 3, 4}])
def test_several_bad_clients_cost_their_own_replies(bad: set[int]) -> None:
    method = methods.build("fedavg", SHORT)
    spoilt, records = run(Byzantine(method, bad, with_nan))
    assert rejections(records) == [(client, "non_finite") for client in sorted(bad)] * ROUNDS
    assert spoilt == run(Byzantine(method, bad, fail))[0] != run(method)[0]


def test_a_round_of_bad_clients_only_changes_nothing() -> None:
    method = methods.build("fedopt", SHORT)
    everybody = set(range(FEDERATION.num_clients))
    spoilt, records = run(Byzantine(method, everybody, with_nan))
    assert [record["abandoned"] for record in records] == ["no reply was accepted"] * ROUNDS
    fresh = Simulation(
        method, small_task(), FEDERATION, Link(float32(), float32()), Schedule(rounds=1, cohort=1), seed=0
    )
    assert spoilt == tree_sha256(fresh.state.server)


class Raw:
    """A sender that writes whatever it has, as a hostile one might, or less; the receiver is the real one."""

    text, id = float32().text, float32().id

    def __init__(self, cut: int = 0) -> None:
        self._honest, self._cut = float32(), cut

    def init_state(self, spec: Spec) -> Tree:
        return {}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        payload = b"".join(leaf_bytes(leaf) for leaf in tree.values())
        return (payload[: -self._cut] if self._cut and float(tree["0.weight"][0, 0]) == MARK else payload), {}

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        return self._honest.decode(blob, spec, shared)


MARK = 2.0**100


def marked(message: Tree) -> Tree:
    return {name: torch.full_like(leaf, MARK) for name, leaf in message.items()}


def test_a_nan_that_the_sender_did_not_mind_is_refused_by_the_server() -> None:
    method = methods.build("fedavg", SHORT)
    spoilt, records = run(Byzantine(method, {2}, with_nan), up=Raw())
    assert rejections(records) == [(2, "non_finite")] * ROUNDS
    assert spoilt == run(Byzantine(method, {2}, fail))[0]
    frame = 40 + 4 * sum(leaf.size for leaf in small_task().spec.values())
    assert records[0]["bytes_up"] == 6 * frame  # it came, so it is counted


@pytest.mark.parametrize("cut", [1, 4, 100])
def test_a_payload_that_is_cut_is_refused_by_the_server(cut: int) -> None:
    method = methods.build("fedmedian", SHORT)
    spoilt, records = run(Byzantine(method, {4}, marked), up=Raw(cut))
    assert rejections(records) == [(4, "truncated")] * ROUNDS
    assert spoilt == run(Byzantine(method, {4}, fail))[0]


def test_a_message_of_another_shape_is_refused() -> None:
    def longer(message: Tree) -> Tree:
        return {name: torch.cat([leaf, leaf]) for name, leaf in message.items()}

    method = methods.build("fedavg", SHORT)
    spoilt, records = run(Byzantine(method, {1}, longer))
    assert [client for client, _ in rejections(records)] == [1] * ROUNDS
    assert spoilt == run(Byzantine(method, {1}, fail))[0]


def test_a_client_without_data_is_passed_over() -> None:
    method = methods.build("fedavg", SHORT)
    spoilt, records = run(method, clients=Poor(2))
    assert rejections(records) == [(2, "no_data")] * ROUNDS
    assert spoilt == run(Byzantine(method, {2}, fail))[0]
