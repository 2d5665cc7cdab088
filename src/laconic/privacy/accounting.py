"""What a release costs: Rényi divergences, amplification by drawing bits, conversion to (ε, δ), many rounds.

Any two θ in [c, 1 − c]^d are adjacent: the guarantee covers all of a client's data at once, and it holds against
whoever reads that client's mask.

| symbol | here |
|---|---|
| α | `orders` of Rényi divergences, > 1 |
| r_α(p) | `binary_divergence`: of Bernoulli(p) from Bernoulli(1 − p) |
| ε_R(α) | `gaussian_rdp`: αΔ²/2σ² |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from laconic.core import ConfigError
from laconic.privacy.mechanisms import gaussian_delta, response, sensitivity
from laconic.privacy.ranges import check_count, check_delta, check_sensitivity, check_sigma

Floats = NDArray[np.float64]

ORDERS: Floats = 1 + np.geomspace(1e-3, 1e6, 4000)
"""Orders to minimise over. The least of bounds that all hold is one that holds, however the orders are chosen."""

_HALVINGS = 100


# --- Rényi divergences -----------------------------------------------------------------------------------------------


def binary_divergence(p: ArrayLike, orders: ArrayLike) -> Floats:
    """r_α(p) = ln(p^α (1−p)^{1−α} + (1−p)^α p^{1−α})/(α − 1), in nats.

    Zero at ½, symmetric, increasing in α up to |ln((1 − p)/p)|.

    >>> round(float(5 * binary_divergence(0.2, 5)), 4)
    6.6525
    """
    p, orders = np.asarray(p, np.float64), _orders(orders)
    if np.any((p <= 0) | (p >= 1)):
        raise ConfigError("privacy: a Bernoulli probability must lie strictly between 0 and 1.")
    one, other = np.log(p), np.log1p(-p)
    tilt = (orders - 1) * (other - one)
    # p e^-tilt + (1 − p) e^tilt, in one of two forms: small tilts need its distance from 1, large ones overflow.
    small = np.clip(tilt, -1, 1)
    near = np.log1p(p * np.expm1(-small) + (1 - p) * np.expm1(small))
    total = np.where(np.abs(tilt) < 1, near, np.logaddexp(one - tilt, other + tilt))
    return np.asarray(np.maximum(total, 0.0) / (orders - 1), np.float64)


def gaussian_rdp(*, sigma: float, sensitivity: float, orders: ArrayLike = ORDERS) -> Floats:
    """ε_R(α) = αΔ²/2σ² (Mironov, 2017); infinite without noise.

    >>> float(gaussian_rdp(sigma=2.0, sensitivity=1.0, orders=4))
    0.5
    """
    check_sigma(sigma)
    check_sensitivity(sensitivity)
    orders = _orders(orders)
    if sigma == 0:
        return np.full(orders.shape, np.inf)
    return np.asarray(orders * (sensitivity / sigma) ** 2 / 2, np.float64)


def amplified_rdp(*, c: float, sigma: float, dimensions: int, orders: ArrayLike = ORDERS) -> Floats:
    """min{ε_R(α), d·r_α(c)}: what is left when only one mask is released (Imola & Chaudhuri, 2021)."""
    noise = gaussian_rdp(sigma=sigma, sensitivity=sensitivity(c=c, dimensions=dimensions), orders=orders)
    return np.minimum(noise, dimensions * binary_divergence(c, orders))


def mask_rdp(*, c: float, sigma: float, dimensions: int, orders: ArrayLike = ORDERS) -> Floats:
    """d·r_α(g(c)): what one mask gives away, exactly; never more than `amplified_rdp`.

    Coordinates get independent noise, so a released bit is Bernoulli(g(θ)) and nothing else, with g(θ) in
    [g(c), 1 − g(c)]. The farthest pair of θ, all c against all 1 − c, attains the value.

    >>> kwargs = {"c": 0.2, "sigma": 0.5, "dimensions": 5, "orders": 5}
    >>> round(float(mask_rdp(**kwargs)), 3), round(float(amplified_rdp(**kwargs)), 3)
    (2.061, 6.653)
    """
    check_count("dimensions", dimensions)
    return dimensions * binary_divergence(least_probability(c=c, sigma=sigma), orders)


def least_probability(*, c: float, sigma: float) -> float:
    """g(c): a one is never less probable than that, nor more than 1 − g(c)."""
    return float(response(torch.tensor(c, dtype=torch.float64), c=c, sigma=sigma))


def sampled_gaussian_rdp(*, noise_multiplier: float, sampling_rate: float, orders: ArrayLike) -> Floats:
    """One step of Gaussian noise on a sum to which each party contributes with probability q, unknown to the reader.

    ε_R(α) = ln E_{z~N(0,σ²)}[(1 − q + q e^{(2z−1)/2σ²})^α]/(α − 1) with Δ = 1 (Mironov, Talwar & Zhang, 2019), for
    parties that are added or removed. The integrand is smooth and falls off like a Gaussian: the trapezoidal rule
    gives all digits, at fractional orders too.

    >>> float(sampled_gaussian_rdp(noise_multiplier=2.0, sampling_rate=1.0, orders=4).round(12))
    0.5
    """
    if not 0 < sampling_rate <= 1:
        raise ConfigError(f"privacy: the sampling rate must be in (0, 1], got {sampling_rate}.")
    if not 0 < noise_multiplier < math.inf:
        raise ConfigError(f"privacy: the noise multiplier must be finite and > 0, got {noise_multiplier}.")
    orders = _orders(orders)
    found = [_sampled_order(float(order), noise_multiplier, sampling_rate) for order in orders.ravel()]
    return np.asarray(found, np.float64).reshape(orders.shape)


def _sampled_order(order: float, sigma: float, rate: float) -> float:
    # The integrand is a mixture of Gaussians of this width with centres between 0 and α.
    z = np.arange(-14 * sigma, order + 14 * sigma, sigma / 24)
    stay = math.log1p(-rate) if rate < 1 else -math.inf
    gain = np.logaddexp(stay, math.log(rate) + (2 * z - 1) / (2 * sigma * sigma))
    terms = order * gain - z * z / (2 * sigma * sigma)
    top = terms.max()
    total = top + math.log(np.exp(terms - top).sum()) + math.log((z[1] - z[0]) / (sigma * math.sqrt(2 * math.pi)))
    return max(0.0, float(total)) / (order - 1)


# --- to (ε, δ) -------------------------------------------------------------------------------------------------------


class Converted(NamedTuple):
    """ε for the δ that was asked for, and the order that gave it."""

    epsilon: float
    order: float


def epsilon_from_rdp(
    orders: ArrayLike,
    divergences: ArrayLike,
    delta: float,
    *,
    conversion: Literal["improved", "simple"] = "improved",
) -> Converted:
    """The least ε over the orders.

    `simple`: ε_R + ln(1/δ)/(α − 1) (Mironov, 2017), which FedPM's appendix uses. `improved`:
    ε_R + ln(1 − 1/α) − ln(δα)/(α − 1) (Canonne, Kamath & Steinke, 2020), which is never larger.

    >>> cap = 5 * binary_divergence(0.2, [5.0])
    >>> round(epsilon_from_rdp([5.0], cap, 1e-4, conversion="simple").epsilon, 3)
    8.955
    """
    check_delta(delta)
    orders, divergences = _orders(orders).ravel(), np.asarray(divergences, np.float64).ravel()
    if len(orders) != len(divergences) or len(orders) == 0:
        raise ConfigError(f"privacy: {len(orders)} orders, but {len(divergences)} divergences; there must be one each.")
    cost = -math.log(delta) / (orders - 1)
    if conversion == "improved":
        cost = cost + np.log1p(-1 / orders) - np.log(orders) / (orders - 1)
    elif conversion != "simple":
        raise ConfigError(f"privacy: the conversion must be 'improved' or 'simple', got {conversion!r}.")
    found = divergences + cost
    best = int(np.argmin(found))
    return Converted(max(0.0, float(found[best])), float(orders[best]))


def gaussian_epsilon(*, sigma: float, delta: float, sensitivity: float, rounds: int = 1) -> float:
    """ε of `rounds` releases with Gaussian noise, exactly: together they are one with σ/√rounds.

    >>> round(gaussian_epsilon(sigma=1.0, delta=1e-5, sensitivity=1.0), 4)
    4.3772
    """
    check_sigma(sigma)
    check_delta(delta)
    check_sensitivity(sensitivity)
    check_count("rounds", rounds)
    if sigma == 0:
        return math.inf
    together = sigma / math.sqrt(rounds)
    ratio = sensitivity / together
    high = ratio * ratio / 2 + ratio * math.sqrt(2 * math.log(1 / delta))  # Rényi's bound
    return _least_epsilon(
        lambda epsilon: gaussian_delta(epsilon=epsilon, sigma=together, sensitivity=sensitivity), high, delta
    )


def mask_epsilon(*, probability: float, bits: int, delta: float) -> float:
    """ε of `bits` released bits none of which is less probable than `probability` either way, exactly.

    The bits may belong to one round or to many, and later rounds may depend on earlier ones.

    >>> round(mask_epsilon(probability=0.2, bits=1, delta=1e-9), 6), round(math.log(4), 6)
    (1.386294, 1.386294)
    """
    check_delta(delta)
    loss = _Loss.of(probability, bits)
    return _least_epsilon(loss.delta, loss.largest, delta)


def mask_delta(*, probability: float, bits: int, epsilon: float) -> float:
    """δ of `bits` released bits for a given ε ≥ 0, exactly.

    The farthest pair of θ differs in all n bits. With x of them on its side, the loss is (2x − n)·ln((1 − p)/p), and
    δ(ε) = E[max(0, 1 − e^{ε − loss})] under x ~ Binomial(n, 1 − p). All other pairs can be simulated from this one.

    >>> round(mask_delta(probability=0.2, bits=1, epsilon=0.0), 6)
    0.6
    """
    return _Loss.of(probability, bits).delta(epsilon)


class _Loss(NamedTuple):
    """The privacy loss of many bits: its values, how probable they are, and the largest that there can be."""

    values: torch.Tensor
    mass: torch.Tensor
    largest: float

    @classmethod
    def of(cls, probability: float, bits: int) -> _Loss:
        check_count("bits", bits)
        if not 0 < probability < 1:
            raise ConfigError(f"privacy: a Bernoulli probability must lie strictly between 0 and 1, got {probability}.")
        p = min(probability, 1 - probability)
        one, other = math.log1p(-p), math.log(p)
        # Twenty standard deviations: what lies beyond is less than e^-190.
        centre, width = bits * (1 - p), 20 * math.sqrt(bits * p * (1 - p)) + 20
        first, last = max(0, math.floor(centre - width)), min(bits, math.ceil(centre + width))
        x = torch.arange(first, last + 1, dtype=torch.float64)
        ways = math.lgamma(bits + 1) - torch.lgamma(x + 1) - torch.lgamma(bits - x + 1)
        mass = torch.exp(ways + x * one + (bits - x) * other)
        return cls((2 * x - bits) * (one - other), mass, bits * (one - other))

    def delta(self, epsilon: float) -> float:
        return float(-(self.mass * torch.expm1((epsilon - self.values).clamp_(max=0))).sum())


def _least_epsilon(excess: Callable[[float], float], high: float, delta: float) -> float:
    """The least ε in [0, high] whose δ is small enough, from above; `high` is known to be enough."""
    if excess(0.0) <= delta:
        return 0.0
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if excess(middle) <= delta else (middle, high)
    return high


# --- many rounds, by a library ---------------------------------------------------------------------------------------


def composed_epsilon(
    *,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    sampling_rate: float = 1.0,
    accountant: Literal["rdp", "pld"] = "rdp",
) -> float:
    """ε of `rounds` Gaussian releases to which each party contributes with a secret probability, by dp-accounting.

    `noise_multiplier` is σ/Δ. `rdp` is Rényi's accountant, `pld` the tighter one by privacy loss distributions. Needs
    the extra `privacy`.
    """
    check_count("rounds", rounds)
    check_delta(delta)
    if not 0 < sampling_rate <= 1:
        raise ConfigError(f"privacy: the sampling rate must be in (0, 1], got {sampling_rate}.")
    if not 0 < noise_multiplier < math.inf:
        raise ConfigError(f"privacy: the noise multiplier must be finite and > 0, got {noise_multiplier}.")
    library = _dp_accounting()
    event = library.GaussianDpEvent(noise_multiplier)
    if sampling_rate < 1:
        event = library.PoissonSampledDpEvent(sampling_rate, event)
    if accountant == "rdp":
        chosen = library.rdp.RdpAccountant()
    elif accountant == "pld":
        chosen = library.pld.PLDAccountant()
    else:
        raise ConfigError(f"privacy: the accountant must be 'rdp' or 'pld', got {accountant!r}.")
    return float(chosen.compose(event, rounds).get_epsilon(delta))


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError(
            'privacy: composing sampled rounds needs dp-accounting; run: pip install "laconic[privacy]"'
        ) from None
    return dp_accounting


def _orders(orders: ArrayLike) -> Floats:
    found = np.asarray(orders, np.float64)
    if not np.all(found > 1):
        raise ConfigError("privacy: Rényi orders must be greater than 1.")
    return found
