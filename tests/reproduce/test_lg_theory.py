"""The recipe `lg-theory`: its formulas, its algebra, and what it finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from laconic.core import Key
from laconic.reproduce import Job, Outcome
from laconic.reproduce.lg_theory import (
    CHECK,
    PAPER,
    World,
    corrected_best,
    corrected_error,
    printed_best,
    printed_error,
    repeated,
    run,
    simulate,
)

AT = {"spread": 0.05, "noise": 1.0}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(Job(seed=0, scale=0.1, folder=tmp_path_factory.mktemp("job")))


def test_the_check_values() -> None:
    assert corrected_error(0.0, CHECK, **AT) == pytest.approx(0.0500, abs=5e-5)
    assert printed_error(0.0, CHECK, **AT) == pytest.approx(0.0049, abs=5e-5)
    assert corrected_best(CHECK, **AT) == pytest.approx(0.5)
    assert printed_best(CHECK, **AT) == pytest.approx(0.048, abs=5e-4)


def test_monte_carlo_agrees_with_the_corrected_formula() -> None:
    found = repeated(CHECK, 100, Key.from_seed(0))
    errors = found.error(0.0, **AT)
    assert float(errors.mean()) == pytest.approx(0.0505, abs=0.001)
    assert found.best(**AT) == pytest.approx(0.5, abs=0.05)
    assert abs(float(errors.mean()) - printed_error(0.0, CHECK, **AT)) > 0.04


@pytest.mark.parametrize("inputs", ["uniform", "gaussian"])
def test_the_products_against_plain_least_squares(inputs: object) -> None:
    """The same draws, written out: û_m and v̂ fitted to labels, judged by Σ."""
    world = World(3, 4, 30, inputs)  # type: ignore[arg-type]
    alpha, spread, noise, key = 0.3, 0.7, 1.3, Key.from_seed(4)
    rng = key.numpy()
    shape = (world.devices, world.examples, world.dimensions)
    x = rng.uniform(-1, 1, size=shape) if inputs == "uniform" else rng.standard_normal(shape)
    labels_noise = noise * rng.standard_normal((world.devices, world.examples))
    v = np.arange(1.0, 4.0)
    u = v + spread * rng.standard_normal((world.devices, world.dimensions))
    y = np.einsum("mnd,md->mn", x, u) + labels_noise
    pooled = np.linalg.lstsq(x.reshape(-1, 3), y.ravel(), rcond=None)[0]
    variance = 1 / 3 if inputs == "uniform" else 1.0
    errors = []
    for m in range(world.devices):
        own = np.linalg.lstsq(x[m], y[m], rcond=None)[0]
        errors.append(variance * float(np.sum((alpha * own + (1 - alpha) * pooled - u[m]) ** 2)))
    found = simulate(world, key).error(alpha, spread=spread, noise=noise)
    assert float(found) == pytest.approx(np.mean(errors), rel=1e-9)


def test_the_best_alpha_is_where_the_error_is_least() -> None:
    found = repeated(World(3, 4, 30, "gaussian"), 5, Key.from_seed(0))
    best = found.best(spread=0.3, noise=1.0)
    least = float(found.error(best, spread=0.3, noise=1.0).mean())
    for beside in (best - 0.01, best + 0.01):
        assert float(found.error(beside, spread=0.3, noise=1.0).mean()) > least
    world, at = World(20, 100, 2000, "uniform"), {"spread": 0.1, "noise": 1.5}
    for error, minimiser in ((corrected_error, corrected_best), (printed_error, printed_best)):
        alpha = minimiser(world, **at)
        assert error(alpha, world, **at) < min(error(alpha - 0.01, world, **at), error(alpha + 0.01, world, **at))


def test_which_is_better_depends_on_what_the_noise_was() -> None:
    """ρ = 0.06: with the text's 1.5 local is better, 2.2725 to 2.2740; with 2.25 global is, as the figure shows."""
    at = {"spread": 0.06, "noise": 1.5}
    local, shared = (1.5**2 + corrected_error(alpha, PAPER, **at) for alpha in (1.0, 0.0))
    assert (local, shared) == (pytest.approx(2.2725, abs=5e-5), pytest.approx(2.2740, abs=5e-5))
    at = {"spread": 0.06, "noise": 2.25}
    assert corrected_error(1.0, PAPER, **at) > corrected_error(0.0, PAPER, **at)
    # At ρ = 0.1 the figure says local; the printed theorem says global.
    at = {"spread": 0.1, "noise": 1.5}
    assert corrected_error(1.0, PAPER, **at) < corrected_error(0.0, PAPER, **at)
    assert printed_error(1.0, PAPER, **at) > printed_error(0.0, PAPER, **at)


def test_everything_that_is_judged_is_within(outcome: Outcome) -> None:
    assert len(outcome.rows) == 15
    assert [row.label for row in outcome.rows if row.within is not True] == []
    orders = {row.label: row.ours < 0 for row in outcome.rows if row.label.startswith("local − global")}
    assert orders == {
        "local − global error, ρ = 0.1, noise 1.5": True,
        "local − global error, ρ = 0.06, noise 1.5": True,
        "local − global error, ρ = 0.1, noise 2.25": True,
        "local − global error, ρ = 0.06, noise 2.25": False,
    }


def test_the_printed_formula_would_not_be_within(outcome: Outcome) -> None:
    wrong = [row for row in outcome.rows if abs(row.paper - row.expected) > row.tolerance]  # type: ignore[operator]
    assert wrong == list(outcome.rows)


def test_the_panels(outcome: Outcome) -> None:
    panels = outcome.data["panels"]
    assert [(panel["noise"], panel["spread"]) for panel in panels] == [
        (noise, spread) for noise in (1.5, 2.25) for spread in (0.5, 0.1, 0.06, 0.02)
    ]
    for panel in panels:
        assert {len(panel[name]) for name in ("monte_carlo", "standard_error", "corrected", "printed")} == {11}
        np.testing.assert_allclose(panel["monte_carlo"], panel["corrected"], rtol=0.05)


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    first, again, other = (run(Job(seed=seed, scale=0.02, folder=tmp_path)).rows for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_figures_can_be_drawn(outcome: Outcome) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="the extra `report` is not installed")
    assert outcome.draw is not None
    figure = figures.Figure()
    outcome.draw(figure)
    assert len(figure.axes) == 8
    assert all({"printed formula", "corrected formula", "Monte Carlo"} == set(labels(axes)) for axes in figure.axes)


def labels(axes: object) -> list[str]:
    return axes.get_legend_handles_labels()[1]  # type: ignore[attr-defined, no-any-return]
