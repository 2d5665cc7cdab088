"""Rényi divergences, amplification, conversion and composition, against closed forms, brute force and dp-accounting."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import ConfigError
from laconic.privacy import (
    ORDERS,
    amplified_rdp,
    binary_divergence,
    composed_epsilon,
    epsilon_from_rdp,
    gaussian_epsilon,
    gaussian_rdp,
    least_probability,
    mask_delta,
    mask_epsilon,
    mask_rdp,
    sampled_gaussian_rdp,
    sensitivity,
)

OPACUS_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))

margins = st.floats(0.01, 0.49)
noises = st.floats(0.05, 5.0)


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")


# --- r_α -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(p=st.floats(0.01, 0.99), order=st.floats(1.01, 100))
def test_the_divergence_of_two_coins(p: float, order: float) -> None:
    found = float(binary_divergence(p, order))
    direct = math.log(p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)) / (order - 1)
    assert found == pytest.approx(direct, rel=1e-9, abs=1e-12)
    assert found == pytest.approx(float(binary_divergence(1 - p, order)), rel=1e-9, abs=1e-12)
    assert 0 <= found <= abs(math.log((1 - p) / p)) + 1e-12


def test_the_divergence_grows_with_the_order_to_the_log_ratio() -> None:
    found = binary_divergence(0.2, ORDERS)
    assert bool((np.diff(found) >= -1e-12).all())
    assert found[0] < found[2000] < found[-1]
    assert float(found[-1]) == pytest.approx(math.log(4), abs=1e-4)
    assert not binary_divergence(0.5, ORDERS).any()


def test_large_orders_do_not_overflow() -> None:
    assert float(binary_divergence(1e-9, 1e6)) == pytest.approx(math.log(1e9), rel=1e-4)


# --- the paper's figure ----------------------------------------------------------------------------------------------


def test_the_papers_cap_is_a_converted_one() -> None:
    cap = 5 * binary_divergence(0.2, [5.0])
    assert float(cap[0]) == pytest.approx(6.6525, abs=5e-5)
    assert epsilon_from_rdp([5.0], cap, 1e-4, conversion="simple").epsilon == pytest.approx(8.955, abs=5e-4)
    # As printed, d·r_α(c) = 8.96 has no solution: for every order it is below 5 ln 4.
    assert float(5 * binary_divergence(0.2, ORDERS).max()) < 5 * math.log(4) < 6.94


# --- amplification ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(c=margins, sigma=noises, dimensions=st.integers(1, 10_000))
def test_the_exact_divergence_is_below_both_of_the_papers(c: float, sigma: float, dimensions: int) -> None:
    exact = mask_rdp(c=c, sigma=sigma, dimensions=dimensions)
    paper = amplified_rdp(c=c, sigma=sigma, dimensions=dimensions)
    noise = gaussian_rdp(sigma=sigma, sensitivity=sensitivity(c=c, dimensions=dimensions))
    bits = dimensions * binary_divergence(c, ORDERS)
    assert bool((paper == np.minimum(noise, bits)).all())
    assert bool((exact <= paper * (1 + 1e-9) + 1e-12 * dimensions).all())


def test_without_noise_bits_are_all_the_privacy_there_is() -> None:
    orders = [2.0, 5.0]
    bits = 5 * binary_divergence(0.2, orders)
    assert amplified_rdp(c=0.2, sigma=0.0, dimensions=5, orders=orders).tolist() == bits.tolist()
    assert mask_rdp(c=0.2, sigma=0.0, dimensions=5, orders=orders).tolist() == pytest.approx(bits.tolist())
    assert gaussian_rdp(sigma=0.0, sensitivity=1.0, orders=orders).tolist() == [math.inf, math.inf]


# --- exact masks -----------------------------------------------------------------------------------------------------


def brute_force_delta(ones: list[float], others: list[float], epsilon: float) -> float:
    """Σ over all masks of max(0, P(m) − e^ε Q(m))."""
    total = 0.0
    for mask in itertools.product((0, 1), repeat=len(ones)):
        first = math.prod(p if bit else 1 - p for bit, p in zip(mask, ones, strict=True))
        second = math.prod(p if bit else 1 - p for bit, p in zip(mask, others, strict=True))
        total += max(0.0, first - math.exp(epsilon) * second)
    return total


@pytest.mark.parametrize(("c", "sigma"), [(0.2, 0.0), (0.2, 0.5), (0.05, 0.3), (0.4, 2.0)])
@pytest.mark.parametrize("delta", [1e-4, 0.03])
def test_the_exact_budget_by_listing_all_masks(c: float, sigma: float, delta: float) -> None:
    p = least_probability(c=c, sigma=sigma)
    epsilon = mask_epsilon(probability=p, bits=6, delta=delta)
    for at in (0.0, 0.5, 2.0):
        found = mask_delta(probability=p, bits=6, epsilon=at)
        assert found == pytest.approx(brute_force_delta([p] * 6, [1 - p] * 6, at), abs=1e-12)
    assert brute_force_delta([p] * 6, [1 - p] * 6, epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert brute_force_delta([p] * 6, [1 - p] * 6, epsilon * 0.999) > delta


def test_no_other_pair_of_thetas_gives_more_away() -> None:
    p, rng = 0.3, np.random.default_rng(0)
    for delta in (1e-3, 0.05):
        epsilon = mask_epsilon(probability=p, bits=4, delta=delta)
        for _ in range(200):
            pair = rng.uniform(p, 1 - p, size=(2, 4)).tolist()
            assert brute_force_delta(*pair, epsilon) <= delta


@settings(deadline=None, max_examples=50)
@given(c=margins, sigma=noises, dimensions=st.integers(1, 300), rounds=st.integers(1, 20), delta=st.floats(1e-9, 0.1))
def test_the_exact_budget_is_below_every_other(
    c: float, sigma: float, dimensions: int, rounds: int, delta: float
) -> None:
    noise = {"c": c, "sigma": sigma}
    exact = mask_epsilon(probability=least_probability(**noise), bits=rounds * dimensions, delta=delta)
    distance = sensitivity(c=c, dimensions=dimensions)
    slack = 1e-9 + 1e-9 * exact
    assert exact <= gaussian_epsilon(sigma=sigma, delta=delta, sensitivity=distance, rounds=rounds) + slack
    for divergence in (mask_rdp, amplified_rdp):
        bound = rounds * divergence(**noise, dimensions=dimensions)
        assert exact <= epsilon_from_rdp(ORDERS, bound, delta).epsilon + slack


def test_the_exact_budget_of_large_masks_against_dp_accounting(library: Any) -> None:
    p, bits, step = 0.45, 400, 1e-4
    # Randomized response with two outcomes keeps the truth with probability 1 − p.
    made = library.pld.privacy_loss_distribution.from_randomized_response(2 * p, 2, value_discretization_interval=step)
    theirs = made.self_compose(bits).get_epsilon_for_delta(1e-5)
    ours = mask_epsilon(probability=p, bits=bits, delta=1e-5)
    assert theirs - bits * step <= ours <= theirs  # theirs rounds every loss up to a multiple of the step


def test_a_million_bits() -> None:
    """Near ½ many bits are like one Gaussian of ratio √n·(1 − 2p)/√(p(1 − p))."""
    p, bits = 0.4995, 1_000_000
    ratio = math.sqrt(bits) * (1 - 2 * p) / math.sqrt(p * (1 - p))
    gaussian = gaussian_epsilon(sigma=1.0, delta=1e-5, sensitivity=ratio)
    assert mask_epsilon(probability=p, bits=bits, delta=1e-5) == pytest.approx(gaussian, rel=1e-3)
    assert mask_epsilon(probability=0.5, bits=bits, delta=1e-5) == 0
    # Where every bit tells much, ε is far beyond what an exponential can hold.
    assert mask_epsilon(probability=0.2, bits=bits, delta=1e-5) == pytest.approx(bits * 0.6 * math.log(4), rel=0.01)


# --- conversion ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(sigma=st.floats(0.3, 20), delta=st.floats(1e-10, 1e-2))
def test_the_least_over_orders_is_the_closed_form(sigma: float, delta: float) -> None:
    found = epsilon_from_rdp(ORDERS, gaussian_rdp(sigma=sigma, sensitivity=1.0), delta, conversion="simple")
    closed = 1 / (2 * sigma**2) + math.sqrt(2 * math.log(1 / delta)) / sigma
    assert closed - 1e-12 <= found.epsilon <= closed * (1 + 1e-4)
    assert found.order == pytest.approx(1 + sigma * math.sqrt(2 * math.log(1 / delta)), rel=0.02)


@settings(deadline=None, max_examples=50)
@given(sigma=st.floats(0.3, 20), delta=st.floats(1e-10, 1e-2))
def test_the_improved_conversion_lies_between_the_simple_and_the_exact(sigma: float, delta: float) -> None:
    divergences = gaussian_rdp(sigma=sigma, sensitivity=1.0)
    improved = epsilon_from_rdp(ORDERS, divergences, delta).epsilon
    assert improved <= epsilon_from_rdp(ORDERS, divergences, delta, conversion="simple").epsilon
    assert improved >= gaussian_epsilon(sigma=sigma, delta=delta, sensitivity=1.0) - 1e-9


def test_conversion_against_dp_accounting(library: Any) -> None:
    theirs = library.rdp.rdp_privacy_accountant.compute_epsilon
    for sigma, delta in ((0.7, 1e-5), (2.0, 1e-4), (10.0, 1e-6)):
        divergences = gaussian_rdp(sigma=sigma, sensitivity=1.0, orders=OPACUS_ORDERS)
        expected, order = theirs(OPACUS_ORDERS, divergences, delta)
        found = epsilon_from_rdp(OPACUS_ORDERS, divergences, delta)
        assert found.epsilon == pytest.approx(expected, abs=1e-6)
        assert found.order == order
        exact = library.get_epsilon_gaussian(sigma, delta)
        assert gaussian_epsilon(sigma=sigma, delta=delta, sensitivity=1.0) == pytest.approx(exact, abs=1e-6)


def test_many_gaussian_rounds_against_dp_accounting(library: Any) -> None:
    for rounds, sigma in ((1, 1.0), (50, 8.0)):
        orders = library.rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
        ours = epsilon_from_rdp(orders, rounds * gaussian_rdp(sigma=sigma, sensitivity=1.0, orders=orders), 1e-5)
        composed = composed_epsilon(noise_multiplier=sigma, rounds=rounds, delta=1e-5)
        assert ours.epsilon == pytest.approx(composed, abs=1e-6)
        exact = gaussian_epsilon(sigma=sigma, delta=1e-5, sensitivity=1.0, rounds=rounds)
        tight = composed_epsilon(noise_multiplier=sigma, rounds=rounds, delta=1e-5, accountant="pld")
        assert exact == pytest.approx(tight, abs=5e-3)
        assert exact <= tight


# --- sampled rounds --------------------------------------------------------------------------------------------------


def test_the_well_known_figure_of_sampled_rounds() -> None:
    """σ = 1.5, q = 0.04, 2250 steps, δ = 1e-5 on Opacus's orders."""
    step = sampled_gaussian_rdp(noise_multiplier=1.5, sampling_rate=0.04, orders=OPACUS_ORDERS)
    found = epsilon_from_rdp(OPACUS_ORDERS, 2250 * step, 1e-5)
    assert found.epsilon == pytest.approx(7.32911117143, abs=1e-9)
    assert found.order == 3.9


def test_sampled_rounds_against_dp_accounting(library: Any) -> None:
    """The same figure at whole orders; between them dp-accounting takes an upper bound, and gives 7.32933."""
    whole = list(range(2, 40))
    event = library.PoissonSampledDpEvent(0.04, library.GaussianDpEvent(1.5))
    theirs = library.rdp.RdpAccountant(whole).compose(event, 2250).get_epsilon(1e-5)
    step = sampled_gaussian_rdp(noise_multiplier=1.5, sampling_rate=0.04, orders=whole)
    assert epsilon_from_rdp(whole, 2250 * step, 1e-5).epsilon == pytest.approx(theirs, abs=1e-6)
    composed = composed_epsilon(noise_multiplier=1.5, rounds=2250, delta=1e-5, sampling_rate=0.04)
    assert 7.32911117143 <= composed <= 7.3294
    assert composed_epsilon(noise_multiplier=1.5, rounds=2250, delta=1e-5, sampling_rate=0.04, accountant="pld") < 7.0


@settings(deadline=None, max_examples=50)
@given(sigma=st.floats(0.5, 10), rate=st.floats(0.001, 1), order=st.integers(2, 30))
def test_sampled_rounds_at_whole_orders_are_a_binomial_sum(sigma: float, rate: float, order: int) -> None:
    terms = [
        math.log(math.comb(order, k)) + k * math.log(rate) + k * (k - 1) / (2 * sigma**2)
        + ((order - k) * math.log1p(-rate) if k < order else 0.0)
        for k in range(order + 1)
        if rate < 1 or k == order
    ]  # fmt: skip
    expected = float(np.logaddexp.reduce(terms)) / (order - 1)
    found = float(sampled_gaussian_rdp(noise_multiplier=sigma, sampling_rate=rate, orders=order))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_composition_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r'needs dp-accounting; run: pip install "laconic\[privacy\]"'):
        composed_epsilon(noise_multiplier=1.0, rounds=1, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_deltas_that_are_refused(delta: float) -> None:
    for use in (
        lambda: epsilon_from_rdp([2.0], [1.0], delta),
        lambda: gaussian_epsilon(sigma=1.0, delta=delta, sensitivity=1.0),
        lambda: mask_epsilon(probability=0.2, bits=5, delta=delta),
        lambda: composed_epsilon(noise_multiplier=1.0, rounds=1, delta=delta),
    ):
        with pytest.raises(ConfigError, match="delta must lie strictly between 0 and 1"):
            use()


def test_other_values_that_are_refused() -> None:
    for use, words in (
        (lambda: binary_divergence(0.2, 1.0), "orders must be greater than 1"),
        (lambda: binary_divergence(0.0, 2.0), "strictly between 0 and 1"),
        (lambda: epsilon_from_rdp([2.0, 3.0], [1.0], 0.1), "2 orders, but 1 divergences"),
        (lambda: epsilon_from_rdp([2.0], [1.0], 0.1, conversion="best"), "conversion must be"),  # type: ignore[arg-type]
        (lambda: mask_epsilon(probability=0.0, bits=5, delta=0.1), "strictly between 0 and 1"),
        (lambda: mask_epsilon(probability=0.2, bits=0, delta=0.1), "bits must be at least 1"),
        (lambda: gaussian_epsilon(sigma=-1.0, delta=0.1, sensitivity=1.0), "sigma must be finite"),
        (lambda: gaussian_epsilon(sigma=1.0, delta=0.1, sensitivity=1.0, rounds=0), "rounds must be at least 1"),
        (lambda: mask_rdp(c=0.5, sigma=1.0, dimensions=1), "c must lie"),
        (lambda: mask_rdp(c=0.2, sigma=1.0, dimensions=0), "dimensions must be at least 1"),
        (lambda: sampled_gaussian_rdp(noise_multiplier=1.0, sampling_rate=0.0, orders=2), "sampling rate must be in"),
        (lambda: sampled_gaussian_rdp(noise_multiplier=0.0, sampling_rate=0.5, orders=2), "noise multiplier must be"),
        (lambda: composed_epsilon(noise_multiplier=0.0, rounds=1, delta=0.1), "noise multiplier must be"),
        (lambda: composed_epsilon(noise_multiplier=1.0, rounds=0, delta=0.1), "rounds must be at least 1"),
        (lambda: composed_epsilon(noise_multiplier=1.0, rounds=1, delta=0.1, sampling_rate=2.0), "sampling rate"),
    ):
        with pytest.raises(ConfigError, match=words):
            use()
