"""Ditto: FedAvg is not disturbed, and own models lie between it and each client by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.core import ClientInfo, ConfigError, Key, read_state, subtree
from laconic.methods import KeepLocal, Solver, ditto, fedavg, local_only
from laconic.testing import check_method, small_task

SOLVER = Solver(lr=0.1, local_epochs=2, batch_size=4)
KEY = Key.from_seed(0)


@pytest.mark.parametrize("lambda_", [0.0, 0.5])
def test_the_server_is_fedavg_s_bit_for_bit(ended: Any, weights: Any, same: Any, lambda_: float) -> None:
    plain, run = ended(fedavg(solver=SOLVER)), ended(ditto(lambda_=lambda_, solver=SOLVER))
    assert same(weights(run), weights(plain))
    assert run.losses == plain.losses


def test_without_pull_everybody_is_alone_bit_for_bit(ended: Any, same: Any) -> None:
    alone = ended(local_only(start="server", solver=SOLVER), cohort=6)
    free, pulled = (ended(ditto(lambda_=value, solver=SOLVER), cohort=6) for value in (0.0, 0.1))
    for client, kept in alone.personal.items():
        assert same(subtree("v", free.personal[client]), subtree("local", kept))
    assert not all(same(subtree("v", pulled.personal[c]), subtree("local", k)) for c, k in alone.personal.items())


def test_the_more_pull_the_nearer_to_the_server(ended: Any, weights: Any) -> None:
    def distance(lambda_: float) -> float:
        run = ended(ditto(lambda_=lambda_, solver=SOLVER), batch_norm=False)
        centre = weights(run)
        models = [subtree("v", kept) for kept in run.personal.values()]
        return sum(float((own[name] - centre[name]).square().sum()) for own in models for name in centre)

    assert distance(0.0) > distance(0.3) > distance(3.0) > 0


def test_an_own_model_is_the_minimum_between_data_and_server(valleys: Any) -> None:
    lambda_ = 0.5
    server, personal = valleys.descend(ditto(lambda_=lambda_, solver=Solver(lr=0.05, local_epochs=200)), rounds=30)
    w = float(server["w/weight"])
    for slope, bottom, kept in zip(valleys.slopes, valleys.bottoms, personal, strict=True):
        wanted = (slope * bottom + lambda_ * w) / (slope + lambda_)
        assert float(kept["v/weight"]) == pytest.approx(wanted, abs=1e-3)


def test_before_its_first_update_a_client_has_what_it_received() -> None:
    task = small_task()
    method: Any = ditto().bind(task)
    received = method.broadcast(method.init(KEY), ClientInfo(0, 1, 0), KEY)
    module = method.local_model(received, {})
    assert all(torch.equal(leaf, received[name]) for name, leaf in read_state(module).items())


def test_leaves_that_are_kept_local_are_trained_once(ended: Any, same: Any) -> None:
    plain, both = (ended(KeepLocal(m, ("4.*",))) for m in (fedavg(solver=SOLVER), ditto(solver=SOLVER)))
    for client, kept in plain.personal.items():
        assert same(subtree("local", both.personal[client]), subtree("local", kept))
        assert subtree("inner", both.personal[client]).keys() == {f"v/{n}" for n in both.task.spec if n[0] != "4"}
    bound: Any = KeepLocal(ditto(solver=SOLVER), ("4.*",)).bind(both.task)
    assert bound.own_part(both.personal[5]).keys() == both.personal[5].keys()  # what the server would need


def test_a_negative_pull_is_refused() -> None:
    with pytest.raises(ConfigError, match="≥ 0, got -1"):
        ditto(lambda_=-1.0)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_laws(batch_norm: bool) -> None:
    check_method(ditto(solver=SOLVER), task=small_task(batch_norm=batch_norm), lossy="ef(topk:fraction=0.3 | int8)")
