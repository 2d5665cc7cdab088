"""The Gaussian mechanism on mask probabilities: noise, bias and calibration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from laconic.core import ConfigError, Key
from laconic.privacy import (
    analytic_sigma,
    classical_sigma,
    clip,
    draw,
    gaussian_delta,
    inverse_response,
    privatize,
    rdp_sigma,
    response,
    response_slope,
    sensitivity,
)

KEY = Key.from_seed(0)
margins = st.floats(0.01, 0.49)
noises = st.floats(0.01, 3.0)


def at(theta: float, *, c: float, sigma: float) -> float:
    return float(response(torch.tensor(theta, dtype=torch.float64), c=c, sigma=sigma))


def printed(theta: float, *, c: float, sigma: float) -> float:
    """The last line of FedPM's appendix C, as printed: exp(−2(c − θ) − 1) in the bracket."""
    cdf = stats.norm(scale=sigma).cdf
    height = sigma / math.sqrt(2 * math.pi) * math.exp(-((c - theta) ** 2) / (2 * sigma**2))
    flat = 1 - c + (theta - 1 + c) * cdf(1 - c - theta) + (c - theta) * cdf(c - theta)
    return float(flat - height * (math.exp(-2 * (c - theta) - 1) - 1))


# --- noise -----------------------------------------------------------------------------------------------------------


def test_the_noise_has_its_mean_and_variance() -> None:
    n, sigma = 200_000, 0.05
    theta = torch.full((n,), 0.5, dtype=torch.float64)
    noise = privatize(theta, KEY, c=0.01, sigma=sigma) - theta  # 0.49/0.05: nothing is clipped
    assert abs(float(noise.mean())) < 4 * sigma / math.sqrt(n)
    assert float(noise.var()) == pytest.approx(sigma**2, rel=0.02)


def test_the_noise_follows_from_the_key_and_differs_by_coordinate() -> None:
    theta = torch.full((50,), 0.5)
    first = privatize(theta, KEY, c=0.1, sigma=0.1)
    assert torch.equal(first, privatize(theta, KEY, c=0.1, sigma=0.1))
    assert not torch.equal(first, privatize(theta, KEY.fold_in("other"), c=0.1, sigma=0.1))
    assert len(first.unique()) > 40
    assert torch.equal(theta, torch.full((50,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_leaves_is_in_the_interval(dtype: torch.dtype) -> None:
    wild = torch.linspace(-2, 3, 4000, dtype=dtype)
    noisy = privatize(wild, KEY, c=0.2, sigma=2.0)
    assert noisy.dtype is dtype
    low, high = clip(torch.tensor([0.0, 1.0], dtype=dtype), c=0.2).tolist()
    assert (low, high) == (pytest.approx(0.2), pytest.approx(0.8))
    assert float(noisy.min()) == low
    assert float(noisy.max()) == high


def test_without_noise_it_is_the_clip() -> None:
    theta = torch.rand(100, generator=KEY.torch())
    assert torch.equal(privatize(theta, KEY, c=0.2, sigma=0.0), clip(theta, c=0.2))


def test_bits_are_ones_as_often_as_they_should_be() -> None:
    n = 200_000
    bits = draw(torch.full((n,), 0.3), KEY)
    assert bits.dtype is torch.bool
    assert abs(float(bits.double().mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n)


# --- bias ------------------------------------------------------------------------------------------------------------


def test_the_response_against_the_whole_mechanism() -> None:
    n = 4_000_000
    theta = torch.full((n,), 0.3, dtype=torch.float64)
    noisy = privatize(theta, KEY.fold_in("noise"), c=0.2, sigma=0.5)
    bits = draw(noisy, KEY.fold_in("bits")).double()
    assert float(noisy.mean()) == pytest.approx(0.4117, abs=0.001)
    assert float(bits.mean()) == pytest.approx(0.4117, abs=0.001)
    assert at(0.3, c=0.2, sigma=0.5) == pytest.approx(float(noisy.mean()), abs=0.0005)


def test_the_printed_formula_is_wrong() -> None:
    assert printed(0.3, c=0.2, sigma=0.5) == pytest.approx(0.44492, abs=5e-6)
    assert abs(printed(0.3, c=0.2, sigma=0.5) - at(0.3, c=0.2, sigma=0.5)) > 0.03
    assert at(0.5, c=0.2, sigma=0.5) == pytest.approx(0.5, abs=1e-15)
    assert printed(0.5, c=0.2, sigma=0.5) != pytest.approx(0.5, abs=0.01)  # it isn't even symmetric


@settings(deadline=None, max_examples=50)
@given(theta=st.floats(0, 1), c=margins, sigma=noises)
def test_the_response_is_the_integral(theta: float, c: float, sigma: float) -> None:
    normal = stats.norm(scale=sigma)
    inner, _ = integrate.quad(lambda x: (theta + x) * normal.pdf(x), c - theta, 1 - c - theta, epsabs=1e-13)
    integral = inner + c * normal.cdf(c - theta) + (1 - c) * normal.sf(1 - c - theta)
    assert at(theta, c=c, sigma=sigma) == pytest.approx(integral, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(theta=st.floats(0, 1), c=margins, sigma=noises)
def test_the_response_is_symmetric(theta: float, c: float, sigma: float) -> None:
    assert at(1 - theta, c=c, sigma=sigma) == pytest.approx(1 - at(theta, c=c, sigma=sigma), abs=1e-13)


@settings(deadline=None, max_examples=50)
@given(c=margins, sigma=noises)
def test_the_response_increases_with_its_slope(c: float, sigma: float) -> None:
    theta = torch.linspace(c, 1 - c, 101, dtype=torch.float64)
    found = response(theta, c=c, sigma=sigma)
    slope = response_slope(theta, c=c, sigma=sigma)
    assert bool((found.diff() > 0).all())
    assert bool(((slope > 0) & (slope <= 1)).all())
    step = 1e-5
    ahead, behind = response(theta + step, c=c, sigma=sigma), response(theta - step, c=c, sigma=sigma)
    torch.testing.assert_close((ahead - behind) / (2 * step), slope, atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=50)
@given(c=margins, sigma=noises)
def test_the_inverse(c: float, sigma: float) -> None:
    theta = torch.linspace(c, 1 - c, 41, dtype=torch.float64).reshape(1, 41)
    slope = float(response_slope(torch.tensor(c), c=c, sigma=sigma))
    back = inverse_response(response(theta, c=c, sigma=sigma), c=c, sigma=sigma)
    torch.testing.assert_close(back, theta, atol=1e-14 / slope + 1e-14, rtol=0)


def test_the_inverse_of_what_no_theta_explains() -> None:
    means = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])
    assert inverse_response(means, c=0.2, sigma=0.5).tolist() == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8])
    assert inverse_response(means, c=0.2, sigma=0.0).tolist() == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8])
    assert inverse_response(torch.empty(0, 3), c=0.2, sigma=0.5).shape == (0, 3)


def test_correction_removes_the_bias() -> None:
    """With clients that share θ, g⁻¹ of a mean over many clients is θ; the mean itself is off by 0.11."""
    clients, theta = 400_000, torch.tensor([0.3, 0.7], dtype=torch.float64)
    noisy = privatize(theta.expand(clients, 2), KEY.fold_in("noise"), c=0.2, sigma=0.5)
    mean = draw(noisy, KEY.fold_in("bits")).double().mean(dim=0)
    slope = response_slope(theta, c=0.2, sigma=0.5)
    error = 4 * 0.5 / math.sqrt(clients) / slope
    assert bool(((mean - theta).abs() > 0.1).all())
    assert bool(((inverse_response(mean, c=0.2, sigma=0.5) - theta).abs() < error).all())


# --- noise for a budget ----------------------------------------------------------------------------------------------


def test_sensitivity() -> None:
    assert sensitivity(c=0.2, dimensions=5) == pytest.approx(0.6 * math.sqrt(5))
    corners = torch.full((5,), 0.2), torch.full((5,), 0.8)
    assert sensitivity(c=0.2, dimensions=5) == pytest.approx(float((corners[0] - corners[1]).norm()))


def test_the_classical_bound_and_where_it_stops() -> None:
    assert classical_sigma(epsilon=0.5, delta=1e-5, sensitivity=2.0) == pytest.approx(
        2 * math.sqrt(2 * math.log(1.25e5)) / 0.5
    )
    for epsilon in (1.0, 8.96):
        with pytest.raises(ConfigError, match=r"proven for epsilon < 1 only, got .*analytic_sigma.*rdp_sigma"):
            classical_sigma(epsilon=epsilon, delta=1e-5, sensitivity=2.0)


def test_beyond_one_the_classical_formula_breaks_its_promise() -> None:
    """Why it is refused: at ε = 20 its noise does not give the δ that it promises."""
    sigma = math.sqrt(2 * math.log(1.25 / 1e-2)) / 20
    assert gaussian_delta(epsilon=20.0, sigma=sigma, sensitivity=1.0) > 1e-2


@settings(deadline=None, max_examples=50)
@given(epsilon=st.floats(0.01, 50), delta=st.floats(1e-12, 0.5), distance=st.floats(0.01, 100))
def test_the_analytic_mechanism_is_exact(epsilon: float, delta: float, distance: float) -> None:
    sigma = analytic_sigma(epsilon=epsilon, delta=delta, sensitivity=distance)
    assert gaussian_delta(epsilon=epsilon, sigma=sigma, sensitivity=distance) <= delta
    assert gaussian_delta(epsilon=epsilon, sigma=sigma * 0.999, sensitivity=distance) > delta
    assert sigma <= rdp_sigma(epsilon=epsilon, delta=delta, sensitivity=distance)
    if epsilon < 1:
        assert sigma < classical_sigma(epsilon=epsilon, delta=delta, sensitivity=distance)


@settings(deadline=None, max_examples=50)
@given(epsilon=st.floats(0, 10), ratio=st.floats(0.1, 5))
def test_gaussian_delta_is_the_integral(epsilon: float, ratio: float) -> None:
    def excess(x: float) -> float:
        return max(0.0, stats.norm.pdf(x - ratio) - math.exp(epsilon) * stats.norm.pdf(x))

    start = epsilon / ratio + ratio / 2  # where the two densities, the second e^ε times, cross
    integral, _ = integrate.quad(excess, start, start + 20, epsabs=1e-12)
    assert gaussian_delta(epsilon=epsilon, sigma=1.0, sensitivity=ratio) == pytest.approx(integral, abs=1e-9)


def test_noise_against_dp_accounting() -> None:
    dp_accounting = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    for epsilon, delta in ((0.5, 1e-5), (4.0, 1e-4), (30.0, 1e-6)):
        theirs = dp_accounting.get_sigma_gaussian(epsilon, delta)
        assert analytic_sigma(epsilon=epsilon, delta=delta, sensitivity=1.0) == pytest.approx(theirs, rel=1e-6)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.0, 0.5, -0.1, 0.7, math.nan])
def test_margins_that_are_refused(c: float) -> None:
    theta = torch.tensor([0.3])
    for use in (
        lambda: clip(theta, c=c),
        lambda: privatize(theta, KEY, c=c, sigma=0.5),
        lambda: response(theta, c=c, sigma=0.5),
        lambda: response_slope(theta, c=c, sigma=0.5),
        lambda: inverse_response(theta, c=c, sigma=0.5),
        lambda: sensitivity(c=c, dimensions=5),
    ):
        with pytest.raises(ConfigError, match=r"c must lie strictly between 0 and 0\.5, got"):
            use()


@pytest.mark.parametrize("sigma", [-0.1, math.inf, math.nan])
def test_noise_that_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="sigma must be finite and ≥ 0, got"):
        privatize(torch.tensor([0.3]), KEY, c=0.2, sigma=sigma)
    with pytest.raises(ConfigError, match="sigma must be finite and ≥ 0, got"):
        response(torch.tensor([0.3]), c=0.2, sigma=sigma)


@pytest.mark.parametrize("find", [classical_sigma, rdp_sigma, analytic_sigma])
def test_budgets_that_are_refused(find: object) -> None:
    assert callable(find)
    for epsilon in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="epsilon must be finite and > 0, got"):
            find(epsilon=epsilon, delta=1e-5, sensitivity=1.0)
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ConfigError, match="delta must lie strictly between 0 and 1, got"):
            find(epsilon=0.5, delta=delta, sensitivity=1.0)
    for distance in (0.0, -1.0, math.inf):
        with pytest.raises(ConfigError, match="sensitivity must be finite and > 0, got"):
            find(epsilon=0.5, delta=1e-5, sensitivity=distance)
    with pytest.raises(ConfigError, match="dimensions must be at least 1, got 0"):
        sensitivity(c=0.2, dimensions=0)
