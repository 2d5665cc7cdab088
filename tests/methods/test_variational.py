"""Variational dropout with several local steps: sparse differences, what is kept, and who keeps log σ²."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.methods.conftest import inside
from torch import nn

from laconic import data, fit, vardrop
from laconic.core import ALONE, ClientInfo, Key, Method, Population, Reply, Task, Tree, resolve, subtree
from laconic.engine import to_everyone
from laconic.methods import Averaged, Solver
from laconic.methods.variational import Fold, put, taken
from laconic.testing import small_federation

KEY = Key.from_seed(7)
SOLVER = Solver(optimizer="adam", lr=1e-2, local_steps=4, batch_size=4)


def _task() -> Task:
    return Task(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))


def _method(**settings: Any) -> Method:
    return vardrop(**{"solver": SOLVER, **settings})


def _bound(population: Population = ALONE, **settings: Any) -> Averaged:
    method = inside(_method(**settings).bind(_task(), population))
    assert isinstance(method, Averaged)
    return method


def _update(method: Averaged, server: Tree, client: int = 3) -> Any:
    received = method.broadcast(server, to_everyone(1), KEY)
    info = ClientInfo(client, 1, 0)
    personal = method.init_client(KEY)
    return received, method.client_update(received, personal, small_federation().client(client), info, KEY)


def test_masked_values_are_taken_and_put_back() -> None:
    values = torch.arange(6.0)
    mask = torch.tensor([True, False, True, True, False, True])
    assert torch.equal(put(taken(values, mask), mask, torch.full((6,), -1.0)), torch.where(mask, values, -1.0))


def test_a_message_holds_what_counts_and_no_more() -> None:
    method = _bound(first_log_sigma2=-1.0, share_alpha=True)
    received, update = _update(method, method.init(KEY))
    masks = method.form.support(update.message)
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    assert 0 < counts["0.weight"] < 24
    for weight, sigma in zip(method.form.weights, method.form.sigmas, strict=True):
        assert len(update.message[weight]) == len(update.message[sigma]) == counts[weight]
    spec = method.message_spec(received)
    assert list(spec) == list(update.message)
    assert resolve(spec, masks | update.message)["0.weight"].shape == (counts["0.weight"],)
    total = sum(counts.values())
    assert method.paper_bytes(received, update.message) == 4 * (2 * 42 + 9 + 2 * total + 9)
    assert update.metrics["gradients_sent"] == pytest.approx((2 * total + 9) / (2 * 42 + 9))


def test_the_kl_counts_once_for_all_clients_or_once_for_each() -> None:
    part = small_federation().client(3).train
    slopes = {}
    for size in ("local", "federation"):
        method = _bound(Population(5, 2), kl_size=size)
        weights = [torch.full((1,), 0.3) for _ in method.form.task.trainable]
        gradients = [torch.zeros(1) for _ in weights]
        pull = method._pull(1, part).gradient
        assert pull is not None
        pull(weights, gradients)
        slopes[size] = torch.cat(gradients)
    assert float(slopes["local"].abs().max()) > 0
    torch.testing.assert_close(slopes["local"], 5 * slopes["federation"])


def test_what_nobody_kept_is_zero_and_may_grow_again() -> None:
    method = _bound()
    server = method.init(KEY)
    ones = {name: torch.ones(leaf.shape) for name, leaf in method.form.moving.items()}
    received = method.broadcast(server, to_everyone(1), KEY)
    masks = [method.form.whole_masks() for _ in range(2)]
    masks[0]["0.weight"][:3] = False
    masks[1]["0.weight"][:2] = False
    replies = [Reply(ClientInfo(c, 1, 5), method.form.packed(ones, m), received) for c, m in enumerate(masks)]
    new = method.server_update(server, replies, KEY)
    before, after = server["w/0.weight"].reshape(-1), new["w/0.weight"].reshape(-1)
    assert after[:2].tolist() == [0, 0]
    torch.testing.assert_close(after[2], before[2] + 0.5)
    torch.testing.assert_close(after[3:], before[3:] + 1)
    assert method.metrics(new)["nonzero/0"] == pytest.approx(22 / 24)
    sent = method.broadcast(new, to_everyone(2), KEY)
    assert len(sent["0.weight"]) == 22
    assert torch.equal(method._unpacked(sent)["0.weight"], new["w/0.weight"])
    back = Reply(ClientInfo(0, 2, 5), method.form.packed(ones, method.form.whole_masks()), sent)
    again = method.server_update(new, [back], KEY)
    assert again["w/0.weight"].reshape(-1)[:2].tolist() == [1, 1]


def test_votes_are_weighed_by_examples_if_asked() -> None:
    method = _bound(weighting="examples")
    server = method.init(KEY)
    received = method.broadcast(server, to_everyone(1), KEY)
    trees = [{name: torch.full(leaf.shape, v) for name, leaf in method.form.moving.items()} for v in (1.0, 4.0)]
    replies = [
        Reply(ClientInfo(c, 1, examples), method.form.packed(tree, method.form.whole_masks()), received)
        for c, (tree, examples) in enumerate(zip(trees, (20, 10), strict=True))
    ]
    new = method.server_update(server, replies, KEY)
    torch.testing.assert_close(new["w/2.bias"], server["w/2.bias"] + 2)


@pytest.mark.parametrize("share_alpha", [False, True])
def test_sigma_is_private_unless_it_is_shared(share_alpha: bool) -> None:
    method = _bound(share_alpha=share_alpha)
    _, update = _update(method, method.init(KEY))
    own = subtree("own", update.personal)
    bound = _method(share_alpha=share_alpha).bind(_task())
    assert bound.personal is bound.own_model is not share_alpha
    assert bool(own) is not share_alpha
    assert ("0.log_sigma2" in update.message) is share_alpha
    moved = update.message["0.log_sigma2"] if share_alpha else own["0.log_sigma2"] + 10
    assert float(moved.abs().max()) > 0


def test_sigma_has_a_rate_of_its_own() -> None:
    steps = {}
    for factor in (1.0, 5.0):
        method = _bound(share_alpha=True, sigma_lr=factor, solver=Solver(optimizer="adam", lr=1e-3, local_steps=2))
        _, update = _update(method, method.init(KEY))
        steps[factor] = {name: float(update.message[name].abs().max()) for name in ("0.log_sigma2", "0.bias")}
    assert steps[5.0]["0.log_sigma2"] == pytest.approx(5 * steps[1.0]["0.log_sigma2"], rel=0.05)
    assert steps[5.0]["0.bias"] == pytest.approx(steps[1.0]["0.bias"], rel=0.05)


def test_a_fold_of_masks_is_that_of_dense_trees() -> None:
    method = _bound()
    fold, dense = Fold(method.form), torch.zeros(24)
    for c in range(3):
        tree = {n: torch.randn(leaf.shape, generator=KEY.fold_in(c).torch()) for n, leaf in method.form.moving.items()}
        masks = {n: torch.rand(s, generator=KEY.fold_in(c, n).torch()) < 0.4 for n, s in method.form.sizes.items()}
        fold.add(method.form.packed(tree, masks), 2.0)
        dense += tree["0.weight"].reshape(-1) * masks["0.weight"]
    torch.testing.assert_close(fold.means()["0.weight"].reshape(-1), dense / 3)


def test_it_learns_with_partial_participation_and_prunes() -> None:
    method = vardrop(
        share_alpha=True,
        first_log_sigma2=-5.0,
        sigma_lr=10.0,
        kl_scale=0.6,
        solver=Solver(optimizer="adam", lr=5e-3, local_steps=10, batch_size=32),
    )
    federation = data.digits(clients=6, partition={"kind": "dirichlet", "alpha": 1.0})
    run = fit(method=method, data=federation, rounds=12, cohort=3, workers=0, eval_every=12, evaluations=("global",))
    assert run.summary["global_accuracy"] > 0.7
    assert run.summary["nonzero"] < 0.8
    zeros = sum(int((p == 0).sum()) for name, p in run.model.named_parameters() if name.endswith("weight"))
    weights = sum(p.numel() for name, p in run.model.named_parameters() if name.endswith("weight"))
    assert zeros / weights == pytest.approx(1 - run.summary["nonzero"], abs=0.01)
