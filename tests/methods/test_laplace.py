from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.core import ClientInfo, ConfigError, Key, Tree, isolated
from laconic.methods import Laplace, Solver, Vote, fedavg, fedmedian, median
from laconic.testing import small_federation, small_task

KEY = Key.from_seed(0)
FEDERATION = small_federation()
# Quarters of small integers: sums and halves of them are exact.
VALUES = st.integers(-40, 40).map(lambda i: i / 4)


def brute_force(values: list[float], weights: list[int]) -> float:
    """The midpoint of all minimisers of Σ_s weight_s |x_s − m|; the ends of that interval are among the x_s."""
    cost = {m: sum(w * abs(x - m) for x, w in zip(values, weights, strict=True)) for m in values}
    best = [m for m, total in cost.items() if total == min(cost.values())]
    return (min(best) + max(best)) / 2


# --- the median ------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.tuples(VALUES, st.integers(1, 5)), min_size=1, max_size=9))
def test_the_weighted_median_is_the_brute_force_one(votes: list[tuple[float, int]]) -> None:
    values, weights = [x for x, _ in votes], [w for _, w in votes]
    found = median(torch.tensor(values), torch.tensor(weights, dtype=torch.float64))
    assert float(found) == brute_force(values, weights)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([5.0], [1], 5.0),
        ([1.0, 2.0], [1, 1], 1.5),
        ([1.0, 2.0], [1, 3], 2.0),
        ([4.0, 1.0, 2.0, 100.0], [1, 1, 1, 1], 3.0),  # torch.median would give 2
        ([2.0, 2.0, 2.0, 7.0], [1, 1, 1, 1], 2.0),
        ([1.0, 1.0, 3.0, 3.0], [1, 1, 1, 1], 2.0),
        ([1.0, 5.0, 9.0], [1, 1, 2], 7.0),  # half of the weight is reached exactly between 5 and 9
        ([1.0, 5.0, 9.0], [2, 1, 1], 3.0),
        ([3.0, 1.0, 2.0], [600, 10, 10], 3.0),
    ],
)
def test_the_median_by_hand(values: list[float], weights: list[int], expected: float) -> None:
    assert float(median(torch.tensor(values), torch.tensor(weights, dtype=torch.float64))) == expected


def test_the_median_is_taken_coordinate_by_coordinate() -> None:
    values = KEY.numpy().integers(-9, 9, size=(6, 3, 4)).astype("float32")
    weights = [3, 1, 1, 2, 5, 2]
    found = median(torch.from_numpy(values), torch.tensor(weights, dtype=torch.float64))
    assert found.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            assert float(found[i, j]) == brute_force(values[:, i, j].tolist(), weights)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20),
    st.floats(-1e6, 1e6, width=32),
    st.data(),
)
def test_one_corrupted_client_of_three_or_more_cannot_leave_the_honest_range(
    honest: list[float], lie: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(honest)))
    values = [*honest[:place], lie, *honest[place:]]
    shift = Laplace().shift(
        {"weight": torch.zeros(1)}, [Vote(1.0, {"weight": torch.tensor([x])}) for x in values], small_task()
    )
    assert min(honest) <= float(shift["weight"]) <= max(honest)


def test_a_minority_cannot_leave_it_either() -> None:
    honest = torch.randn(6, 50, generator=KEY.torch())
    lies = torch.full((5, 50), 1e30)
    found = median(torch.cat([lies, honest]), torch.ones(11))
    assert bool(((honest.min(dim=0).values <= found) & (found <= honest.max(dim=0).values)).all())


# --- the M-step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_closed_form_minimises_the_sum_of_distances(clients: int, weighted: bool) -> None:
    rng = KEY.fold_in(clients).torch()
    w = torch.randn(30, generator=rng, dtype=torch.float64)
    phi = torch.randn(clients, 30, generator=rng, dtype=torch.float64)
    weights = torch.arange(1, clients + 1, dtype=torch.float64) if weighted else torch.ones(clients).double()
    votes = [Vote(float(weight), {"weight": row - w}) for weight, row in zip(weights, phi, strict=True)]

    def cost(at: Tensor) -> Tensor:
        return (weights[:, None] * (phi - at).abs()).sum(dim=0)

    new = w + Laplace().shift({"weight": w}, votes, small_task())["weight"]
    for scale in (1e-3, 1e-1, 1.0):
        for _ in range(20):
            other = new + scale * torch.randn(30, generator=rng, dtype=torch.float64)
            assert bool((cost(new) <= cost(other) + 1e-12).all())


def test_the_gradient_m_step_follows_the_signs() -> None:
    deltas = torch.tensor([[1.0, -2.0, 0.0, 0.5], [3.0, -0.1, 0.0, -0.5], [2.0, 4.0, 1.0, 0.0], [0.1, -1.0, 0.0, 0.0]])
    votes = [Vote(1.0, {"0.weight": delta}) for delta in deltas]
    task = small_task()
    assert Laplace().ascent({"0.weight": torch.zeros(4)}, votes, task)["0.weight"].tolist() == [1.0, -0.5, 0.25, 0.0]
    weighted = [Vote(weight, vote.message) for weight, vote in zip([5.0, 1.0, 1.0, 1.0], votes, strict=True)]
    assert Laplace().ascent({}, weighted, task)["0.weight"].tolist() == [1.0, -0.75, 0.125, 0.5]


def test_the_gradient_m_step_takes_means_of_running_statistics() -> None:
    # A sign would move a variance by 1 and make it negative in time.
    task = small_task(batch_norm=True)
    votes = [Vote(1.0, {"0.weight": torch.tensor([d]), "1.running_var": torch.tensor([d])}) for d in (0.5, -0.1)]
    ascent = Laplace().ascent({}, votes, task)
    assert ascent["0.weight"].tolist() == [0.0]
    assert ascent["1.running_var"].tolist() == [torch.tensor([0.5, -0.1]).mean().item()]


# --- the E-step ------------------------------------------------------------------------------------------------------


def received() -> Tree:
    return small_task().init(KEY.fold_in("init"))


def message(solver: Solver, penalty: float, client: int = 4) -> Tree:
    method = fedmedian(penalty=penalty, solver=solver).bind(small_task())
    with isolated(KEY):
        return method.client_update(received(), {}, FEDERATION.client(client), ClientInfo(client, 1, 0), KEY).message


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_some_coordinates_are_exactly_the_servers(optimizer: str) -> None:
    solver = Solver(optimizer=optimizer, lr=0.05, local_epochs=3, batch_size=5)  # type: ignore[arg-type]
    free, drawn = message(solver, 0.0), message(solver, 0.5)
    count = sum(leaf.numel() for leaf in drawn.values())
    zeros = sum(int((leaf == 0).sum()) for leaf in drawn.values())
    assert sum(int((leaf == 0).sum()) for leaf in free.values()) < zeros < count
    fitted = fedmedian(penalty=0.5, solver=solver).bind(small_task())
    start = received()
    with isolated(KEY):
        update = fitted.client_update(start, {}, FEDERATION.client(4), ClientInfo(4, 1, 0), KEY)
    assert update.fitted is not None
    for name, parameter in update.fitted.named_parameters():
        same = parameter.detach() == start[name]
        assert torch.equal(same, update.message[name] == 0)


def test_a_heavy_penalty_leaves_everything_where_it_was() -> None:
    drawn = message(Solver(lr=0.05, local_epochs=2), 1e3)
    assert all(not leaf.any() for leaf in drawn.values())


def test_a_step_is_soft_thresholded_by_rate_times_penalty() -> None:
    # One full batch: φ = w − ηg, then w + sign(φ − w) max(|φ − w| − ηλ, 0).
    lr, penalty = 0.25, 0.125
    solver = Solver(lr=lr, local_steps=1, batch_size=100)
    start, plain, drawn = received(), message(solver, 0.0), message(solver, penalty)
    for name, w in start.items():
        phi = w + plain[name]
        gap = phi - w
        soft = gap.sign() * (gap.abs() - lr * penalty).clamp(min=0)
        torch.testing.assert_close(drawn[name], soft, rtol=0, atol=2e-7)  # a rounding of φ ≈ 1 either way
        inside = gap.abs() < lr * penalty - 1e-6
        assert bool(inside.any())
        assert not drawn[name][inside].any()


def test_the_threshold_decays_with_the_learning_rate() -> None:
    task = small_task()
    pull = Laplace(0.5).pull(received(), task)
    assert pull is not None
    assert pull.project is not None
    for lr in (0.5, 0.25):
        weights = [received()[name] + 0.2 for name in task.trainable]
        pull.project(weights, lr)
        moved = torch.cat([(w - received()[n]).flatten() for w, n in zip(weights, task.trainable, strict=True)])
        torch.testing.assert_close(moved, torch.full_like(moved, max(0.2 - lr * 0.5, 0.0)), rtol=0, atol=1e-7)


def test_without_penalty_a_client_does_as_in_fedavg() -> None:
    solver = Solver(lr=0.05, local_epochs=2)
    method = fedavg(solver=solver).bind(small_task())
    with isolated(KEY):
        plain = method.client_update(received(), {}, FEDERATION.client(4), ClientInfo(4, 1, 0), KEY).message
    for name, leaf in message(solver, 0.0).items():
        assert torch.equal(leaf, plain[name])


@pytest.mark.parametrize("penalty", [-1e-9, math.nan, math.inf])
def test_a_penalty_that_is_none(penalty: float) -> None:
    with pytest.raises(ConfigError, match=f"penalty of a Laplace prior must be finite and ≥ 0, got {penalty}"):
        fedmedian(penalty=penalty)
