"""The recipe `fedpm-privacy`: its formulas, and what it finds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from laconic.core import Key
from laconic.privacy import gaussian_epsilon, mask_epsilon, sensitivity
from laconic.reproduce import Job, Outcome
from laconic.reproduce.fedpm_privacy import (
    BUDGETS,
    SETTINGS,
    estimate,
    expected_error,
    printed_response,
    printed_sigma,
    run,
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(Job(seed=1, scale=0.1, folder=tmp_path_factory.mktemp("job")))


def test_everything_that_is_judged_is_within(outcome: Outcome) -> None:
    judged = [row for row in outcome.rows if row.within is not None]
    assert len(judged) == 3 + 2 * len(SETTINGS)
    assert [row.label for row in judged if not row.within] == []


def test_the_papers_figures_stand_beside_ours(outcome: Outcome) -> None:
    cap, largest, bias = outcome.rows[:3]
    assert (cap.paper, cap.ours) == (8.96, pytest.approx(8.955, abs=5e-4))
    assert (largest.paper, largest.ours) == (8.96, pytest.approx(5 * math.log(4), abs=1e-3))
    assert bias.paper == pytest.approx(0.44492, abs=5e-6)
    assert bias.expected == pytest.approx(0.41179, abs=5e-6)
    assert bias.paper is not None
    assert abs(bias.ours - bias.paper) > 0.02


def test_the_curves(outcome: Outcome) -> None:
    epsilon, errors = outcome.data["epsilon"], outcome.data["errors"]
    assert epsilon["printed"] == list(BUDGETS)
    assert max(epsilon["amplified"]) == outcome.data["cap"]
    assert all(exact < paper for exact, paper in zip(epsilon["mask_exact"], epsilon["amplified"], strict=True))
    assert list(errors) == [setting.name for setting in SETTINGS]
    for curve in errors.values():
        assert {len(curve["plain"]), len(curve["corrected"])} == {len(BUDGETS)}
        assert curve["plain"][0] > curve["plain"][-1]
        assert curve["plain"][-1] == pytest.approx(curve["no_dp"], rel=0.25)
    # At ε = 4: correction pays with a thousand clients that share θ; with a hundred it does not.
    at = min(range(len(BUDGETS)), key=lambda i: abs(BUDGETS[i] - 4))
    few, many = errors["shared θ"], errors["shared θ, 1000 clients"]
    assert few["corrected"][at] > few["plain"][at]
    assert many["corrected"][at] < many["plain"][at]


def test_the_accounts_are_the_librarys(outcome: Outcome) -> None:
    epsilon = outcome.data["epsilon"]
    sigma = epsilon["sigma"][10]
    assert sigma == printed_sigma(BUDGETS[10])
    distance = sensitivity(c=0.2, dimensions=5)
    assert epsilon["gaussian_exact"][10] == gaussian_epsilon(sigma=sigma, delta=1e-4, sensitivity=distance)
    assert mask_epsilon(probability=0.2, bits=5, delta=1e-4) == pytest.approx(outcome.rows[-1].ours)


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    first, again, other = (run(Job(seed=seed, scale=0.01, folder=tmp_path)).rows for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("shared", [False, True])
def test_the_expected_error_by_simulation(shared: bool) -> None:
    """Few clients, so that bias and variance both count, and a θ for each repetition."""
    repetitions, clients, sigma, key = 40_000, 100, 0.5, Key.from_seed(5)
    theta = 0.2 + 0.6 * torch.rand(
        repetitions, 1 if shared else clients, 1, generator=key.torch(), dtype=torch.float64
    ).expand(repetitions, clients, 1)
    errors = 5 * estimate(theta, sigma, key).plain  # five coordinates are five times one
    expected = expected_error(sigma, clients=clients, shared=shared)
    assert float(errors.mean()) == pytest.approx(expected, abs=4 * float(errors.std()) / math.sqrt(repetitions))


def test_the_printed_formula() -> None:
    assert printed_response(0.3, c=0.2, sigma=0.5) == pytest.approx(0.44492, abs=5e-6)
