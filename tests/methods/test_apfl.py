"""APFL: FedAvg is not disturbed; the two ends of the mixture, and how its share moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from laconic.core import ClientInfo, ConfigError, Key, isolated, prefixed, read_state, subtree
from laconic.methods import Autoencoder, KeepLocal, Solver, apfl, fedavg, local_only
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=2, batch_size=4)
KEY = Key.from_seed(0)
CLIENT = ClientInfo(4, 2, 0)


@pytest.mark.parametrize("solver", [SOLVER, Solver(optimizer="adam", lr=0.01, local_epochs=2, batch_size=4)])
def test_the_server_is_fedavg_s_bit_for_bit(ended: Any, weights: Any, same: Any, solver: Solver) -> None:
    plain, run = ended(fedavg(solver=solver)), ended(apfl(solver=solver))
    assert same(weights(run), weights(plain))
    assert run.losses == plain.losses


def test_with_a_share_of_1_everybody_is_alone_bit_for_bit(ended: Any, same: Any) -> None:
    alone = ended(local_only(start="server", solver=SOLVER), cohort=6)
    run = ended(apfl(alpha=1.0, adaptive=False, solver=SOLVER), cohort=6)
    half = ended(apfl(alpha=0.5, adaptive=False, solver=SOLVER), cohort=6)
    for client, kept in alone.personal.items():
        assert same(subtree("v", run.personal[client]), subtree("local", kept))
        assert not same(subtree("v", half.personal[client]), subtree("local", kept))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_own_weights_are_fitted_in_the_precision_of_the_run(precision: Any) -> None:
    """With a share of 1 they are what FedAvg's client ends with, from the same start and on the same batches."""
    ended = []
    for method in (fedavg(solver=SOLVER), apfl(alpha=1.0, adaptive=False, solver=SOLVER)):
        bound = method.bind(replace(small_task(), precision=precision))
        received = bound.broadcast(bound.init(KEY), CLIENT, KEY)
        with isolated(KEY):
            update = bound.client_update(received, {}, small_federation().client(4), CLIENT, KEY)
        ended.append(subtree("v", update.personal) or {n: leaf.clone() for n, leaf in bound.task.state().items()})
    assert ended[0].keys() == ended[1].keys()
    assert all(torch.equal(leaf, ended[1][name]) for name, leaf in ended[0].items())


def test_with_a_share_of_0_everybody_has_the_server_s_model(ended: Any, weights: Any) -> None:
    run = ended(apfl(alpha=0.0, adaptive=False, solver=SOLVER), batch_norm=False)
    bound: Any = apfl(alpha=0.0, adaptive=False, solver=SOLVER).bind(run.task)
    for kept in run.personal.values():
        own = read_state(bound.local_model(weights(run), kept))
        assert all(torch.equal(own[name], leaf) for name, leaf in weights(run).items())


def test_an_own_model_is_the_mixture_with_the_newest_weights() -> None:
    task = small_task()
    bound: Any = apfl().bind(task)
    w, v = task.init(KEY), task.init(KEY.fold_in("own"))
    own = read_state(bound.local_model(w, {"alpha": torch.tensor(0.25), **prefixed("v", v)}))
    for name, leaf in own.items():
        torch.testing.assert_close(leaf, 0.25 * v[name] + 0.75 * w[name])
    assert all(torch.equal(leaf, w[name]) for name, leaf in read_state(bound.local_model(w, {})).items())


def test_the_share_takes_one_step_along_the_loss_of_the_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    task, data = small_task(), small_federation().client(4)
    w, share = task.init(KEY), 0.4
    v = {name: 3 * leaf for name, leaf in task.init(KEY.fold_in("own", 1)).items()}

    def loss(alpha: float) -> float:
        module = task.load({name: alpha * v[name] + (1 - alpha) * w[name] for name in w})
        x, y = data.train.tensors()
        return float(task.loss(module(x), y).detach())

    slope = (loss(share + 1e-3) - loss(share - 1e-3)) / 2e-3
    solver = Solver(lr=0.05, lr_decay=0.5, local_epochs=3, batch_size=len(data.train))
    personal = {"alpha": torch.tensor(share), **prefixed("v", v)}
    for adaptive, wanted in ((True, share - 0.025 * slope), (False, share)):  # the second round has half the rate
        update = apfl(adaptive=adaptive, solver=solver).bind(task).client_update(w, personal, data, CLIENT, KEY)
        assert float(update.personal["alpha"]) == pytest.approx(wanted, abs=2e-4)
    assert abs(0.025 * slope) > 0.004


def test_the_share_stays_between_0_and_1() -> None:
    task, data = small_task(), small_federation().client(4)
    w, v = task.init(KEY), task.init(KEY.fold_in("own"))
    found = set()
    for far, near in ((w, v), (v, w)):  # one of them is better
        personal = {"alpha": torch.tensor(0.5), **prefixed("v", {name: 5 * leaf for name, leaf in near.items()})}
        solver = Solver(lr=50.0, local_steps=1)
        made = apfl(solver=solver).bind(task).client_update(far, personal, data, CLIENT, KEY)
        found.add(float(made.personal["alpha"]))
    assert found <= {0.0, 1.0}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha must lie in \[0, 1\], got 1.5"):
        apfl(alpha=1.5)
    with pytest.raises(ConfigError, match="two models in one step, which clip_norm would clip as one"):
        apfl(clip_norm=1.0)
    two: Any = KeepLocal(apfl(solver=SOLVER), ("0.*",), objective=Autoencoder(), solver=SOLVER).bind(small_task())
    received = two.broadcast(two.init(KEY), ClientInfo(0, 1, 0), KEY)
    with pytest.raises(ConfigError, match="one thing beside the task"):
        two.client_update(received, {}, small_federation().client(4), CLIENT, KEY)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_laws(batch_norm: bool) -> None:
    check_method(apfl(solver=SOLVER), task=small_task(batch_norm=batch_norm), lossy="ef(topk:fraction=0.3 | int8)")
