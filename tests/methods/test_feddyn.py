"""FedDyn: its linear terms, the server's share of them, and where they lead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.core import ClientInfo, ConfigError, Key, Method, Population, Reply, Tree, isolated, prefixed, subtree
from laconic.methods import Solver, fedavg, feddyn
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=2, batch_size=4)
KEY = Key.from_seed(0)


def random_tree(task: Any, seed: int) -> Tree:
    rng = KEY.fold_in("tree", seed).torch()
    return {name: torch.randn(leaf.shape, generator=rng) for name, leaf in task.moving.items()}


def test_with_less_alpha_a_client_s_message_tends_to_fedavg_s() -> None:
    task, data, client = small_task(), small_federation().client(4), ClientInfo(4, 1, 0)
    own, received = prefixed("u", random_tree(task, 0)), task.init(KEY)

    def message(method: Method) -> Tensor:
        with isolated(KEY):
            sent = method.bind(task).client_update(received, own, data, client, KEY).message
        return torch.cat([leaf.flatten() for leaf in sent.values()])

    plain = message(fedavg(solver=SOLVER))
    far, near, nearer, there = (
        float((message(feddyn(alpha=alpha, solver=SOLVER)) - plain).norm()) for alpha in (1.0, 1e-2, 1e-4, 1e-12)
    )
    assert far > 10 * near > 100 * nearer > 0
    assert there < 1e-6


@pytest.mark.parametrize("cohort", [2, 6])
def test_the_server_has_the_mean_of_all_clients_linear_terms(ended: Any, cohort: int) -> None:
    run = ended(feddyn(alpha=0.1, solver=SOLVER), rounds=4, cohort=cohort)
    for name, leaf in subtree("beside", run.server).items():
        total = sum((kept[f"u/{name}"] for kept in run.personal.values()), torch.zeros(()))
        torch.testing.assert_close(leaf, total / 6, rtol=1e-4, atol=1e-6)


def test_the_server_s_step() -> None:
    task = small_task(batch_norm=True)
    method = feddyn(alpha=0.1).bind(task, Population(8, 2))
    server = method.init(KEY)
    before = {name: torch.ones(task.spec[name].shape) for name in task.trainable}
    server |= prefixed("beside", before)
    replies = [Reply(ClientInfo(i, 1, 5), random_tree(task, i), {}) for i in range(2)]
    new = method.server_update(server, replies, KEY)
    assert new.keys() == server.keys()
    for name in task.moving:
        mean = (replies[0].message[name] + replies[1].message[name]) / 2
        u = before[name] - 2 / 8 * mean if name in before else 0.0  # running statistics are plain means
        torch.testing.assert_close(new[f"w/{name}"], server[f"w/{name}"] + mean - u)
        assert name not in before or torch.allclose(new[f"beside/{name}"], u)
    assert len(subtree("beside", new)) == len(task.trainable) < len(task.moving)


def test_unlike_clients_find_the_common_minimum(valleys: Any) -> None:
    solver = Solver(lr=0.05, local_epochs=100)
    drifted, _ = valleys.descend(fedavg(solver=solver), rounds=150)
    settled, personal = valleys.descend(feddyn(alpha=1.0, solver=solver), rounds=150)
    assert float(drifted["w/weight"]) == pytest.approx(valleys.mean, abs=0.01)
    assert float(settled["w/weight"]) == pytest.approx(valleys.least, abs=1e-4)
    # There, a client's linear term is the gradient of its loss.
    for slope, bottom, kept in zip(valleys.slopes, valleys.bottoms, personal, strict=True):
        assert float(kept["u/weight"]) == pytest.approx(slope * (valleys.least - bottom), abs=1e-3)


def test_nothing_but_fedavg_s_leaves_travels() -> None:
    task = small_task()
    dyn, plain = (m.bind(task) for m in (feddyn(), fedavg()))
    client = ClientInfo(0, 1, 0)
    assert dyn.message_spec({}) == plain.message_spec({})
    assert dyn.broadcast_spec(client, KEY) == plain.broadcast_spec(client, KEY)
    assert dyn.broadcast(dyn.init(KEY), client, KEY).keys() == task.spec.keys()


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf")])
def test_alpha_is_positive(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"alpha must be positive and finite, got .*; for alpha = 0 there is fedavg"):
        feddyn(alpha=alpha)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_laws(batch_norm: bool) -> None:
    check_method(feddyn(solver=SOLVER), task=small_task(batch_norm=batch_norm), lossy="ef(topk:fraction=0.3 | int8)")
