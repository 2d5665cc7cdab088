"""SCAFFOLD: without its control variates it is FedAvg, with them unlike clients find their common minimum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.core import ClientData, ClientInfo, ConfigError, Key, Part, Population, Tree, num_values, prefixed, subtree
from laconic.methods import Solver, fedavg, scaffold, solve
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=2, batch_size=4)
KEY = Key.from_seed(0)
CLIENT = ClientInfo(3, 1, 0)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_without_strength_it_is_fedavg_bit_for_bit(ended: Any, weights: Any, same: Any, weighting: str) -> None:
    chosen = {"weighting": weighting, "solver": SOLVER}
    plain, zero, one = (ended(m) for m in (fedavg(**chosen), scaffold(strength=0.0, **chosen), scaffold(**chosen)))
    assert same(weights(zero), weights(plain))
    assert zero.losses == plain.losses
    assert any(bool(leaf.any()) for leaf in subtree("beside", zero.server).values())  # variates there are
    assert not same(weights(one), weights(plain))
    assert one.losses[0] == plain.losses[0]  # they are zeros at first
    assert one.losses[1:] != plain.losses[1:]


def gradient(task: Any, weights: Tree, data: ClientData) -> Tree:
    module = task.load(weights).train()
    x, y = data.train.tensors()
    found = torch.autograd.grad(task.loss(module(x), y), [dict(module.named_parameters())[n] for n in task.trainable])
    return dict(zip(task.trainable, found, strict=True))


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
def test_a_client_s_variate_is_its_mean_gradient(strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = small_task(), small_federation().client(3)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    whole = Solver(lr=0.05, local_steps=1, batch_size=len(data.train))
    method = scaffold(strength=strength, solver=whole).bind(task)
    rng = KEY.torch()
    c, own = ({n: torch.randn(task.spec[n].shape, generator=rng) for n in task.trainable} for _ in range(2))
    received = {**task.init(KEY), **prefixed("beside", c)}
    update = method.client_update(received, prefixed("c", own), data, CLIENT, KEY)
    new = subtree("c", update.personal)
    for name, wanted in gradient(task, task.init(KEY), data).items():
        torch.testing.assert_close(new[name], wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(update.message[f"beside/{name}"], new[name] - own[name])
        step = -0.05 * (wanted + strength * (c[name] - own[name]))
        torch.testing.assert_close(update.message[name], step, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cohort", [2, 6])
def test_the_server_s_variate_is_the_mean_of_all_clients(ended: Any, cohort: int) -> None:
    run = ended(scaffold(solver=SOLVER), rounds=4, cohort=cohort)
    for name, leaf in subtree("beside", run.server).items():
        total = sum((kept[f"c/{name}"] for kept in run.personal.values()), torch.zeros(()))
        torch.testing.assert_close(leaf, total / 6, rtol=1e-4, atol=1e-6)  # six clients, also those that never replied


def test_unlike_clients_find_the_common_minimum(valleys: Any) -> None:
    solver = Solver(lr=0.05, local_epochs=20)
    drifted, _ = valleys.descend(fedavg(solver=solver), rounds=150)
    settled, _ = valleys.descend(scaffold(solver=solver), rounds=150)
    assert abs(float(drifted["w/weight"]) - valleys.least) > 0.3
    assert float(settled["w/weight"]) == pytest.approx(valleys.least, abs=1e-4)


def test_variates_are_for_what_gradients_change_and_double_the_bytes() -> None:
    task = small_task(batch_norm=True)
    method = scaffold(solver=SOLVER).bind(task)
    spec = method.message_spec({})
    assert [name.removeprefix("beside/") for name in spec if name.startswith("beside/")] == list(task.trainable)
    assert num_values(spec) == num_values(task.spec) + sum(task.spec[name].size for name in task.trainable)


def test_a_client_that_takes_no_step_changes_nothing() -> None:
    # One example is none for batch normalisation.
    task, x = small_task(batch_norm=True), torch.zeros(1, 4)
    method = scaffold(solver=SOLVER).bind(task, Population(2, 2))
    received = method.broadcast(method.init(KEY), CLIENT, KEY)
    data = ClientData(Part.whole(x, torch.zeros(1, dtype=torch.int64)), Part.whole(x, torch.zeros(1)))
    assert solve(task, data.train, SOLVER, round=1, key=KEY).steps == 0
    update = method.client_update(received, {}, data, CLIENT, KEY)
    assert not any(bool(leaf.any()) for leaf in update.message.values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "adam"}, "plain steps: set optimizer = 'sgd' and momentum = 0"),
        ({"momentum": 0.9}, "plain steps"),
        ({"strength": -1.0}, "strength must be finite and ≥ 0, got -1.0"),
    ],
)
def test_what_the_formula_does_not_hold_for_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scaffold(**settings)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_laws(batch_norm: bool) -> None:
    check_method(scaffold(solver=SOLVER), task=small_task(batch_norm=batch_norm), lossy="ef(topk:fraction=0.3 | int8)")
