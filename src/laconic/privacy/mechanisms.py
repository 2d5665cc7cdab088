"""The Gaussian mechanism on mask probabilities, and how much noise a budget asks for.

A client's probabilities θ ∈ [c, 1 − c]^d become bits (Isik et al., 2023, appendix C)::

    θ  →  θ + η, η ~ N(0, σ²I)  →  clip to [c, 1 − c]  →  m ~ Bernoulli

| symbol | here |
|---|---|
| c | margin: no probability comes closer to 0 or 1 |
| σ | `sigma`, standard deviation of the noise |
| ε, δ | `epsilon`, `delta`: the budget, and the probability with which it may be exceeded |
| Δ | `sensitivity`: the longest way that θ can move when a client's data change, (1 − 2c)√d |
| Φ, φ | distribution function and density of N(0, 1) |
| g | `response`: the probability of a one that the whole mechanism makes of θ |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.core import ConfigError, Key
from laconic.privacy.ranges import (
    check_count,
    check_delta,
    check_epsilon,
    check_margin,
    check_sensitivity,
    check_sigma,
)

# Halvings of an interval until double precision has no more to give.
_HALVINGS = 60


# --- the mechanism ---------------------------------------------------------------------------------------------------


def clip(theta: Tensor, *, c: float) -> Tensor:
    """Probabilities brought into [c, 1 − c].

    >>> clip(torch.tensor([0.0, 0.5, 1.0]), c=0.2)
    tensor([0.2000, 0.5000, 0.8000])
    """
    check_margin(c)
    return theta.clamp(c, 1 - c)


def privatize(theta: Tensor, key: Key, *, c: float, sigma: float) -> Tensor:
    """clip(clip(θ) + η) with η ~ N(0, σ²) for each coordinate.

    >>> noisy = privatize(torch.full((4,), 0.3), Key.from_seed(0), c=0.2, sigma=0.5)
    >>> bool(((noisy >= 0.2) & (noisy <= 0.8)).all())
    True
    """
    check_sigma(sigma)
    clipped = clip(theta, c=c)
    noise = torch.randn(theta.shape, generator=key.torch(theta.device), dtype=theta.dtype, device=theta.device)
    return (clipped + sigma * noise).clamp(c, 1 - c)


def draw(probabilities: Tensor, key: Key) -> Tensor:
    """Bits m ~ Bernoulli(probabilities), as booleans."""
    uniform = torch.rand(
        probabilities.shape,
        generator=key.torch(probabilities.device),
        dtype=probabilities.dtype,
        device=probabilities.device,
    )
    return uniform < probabilities


# --- its bias --------------------------------------------------------------------------------------------------------


def response(theta: Tensor, *, c: float, sigma: float) -> Tensor:
    """g(θ) = E[clip(θ + η)], the probability of a one; double precision.

    g(θ) = c + σ[ψ((θ − c)/σ) − ψ((θ − 1 + c)/σ)],   ψ(z) = zΦ(z) + φ(z) = E[max(z + N(0, 1), 0)].

    That is the integral of appendix C written without differences of large terms; the appendix's own last line is
    wrong (docs/privacy.md). g increases, g(½) = ½ and g(1 − θ) = 1 − g(θ).

    >>> round(float(response(torch.tensor(0.3), c=0.2, sigma=0.5)), 5)
    0.41179
    """
    check_margin(c)
    check_sigma(sigma)
    theta = theta.double()
    if sigma == 0:
        return theta.clamp(c, 1 - c)
    return c + sigma * (_ramp((theta - c) / sigma) - _ramp((theta - 1 + c) / sigma))


def _ramp(z: Tensor) -> Tensor:
    """ψ(z) = E[max(z + N(0, 1), 0)]."""
    return z * _normal(z) + torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _normal(z: Tensor) -> Tensor:
    """Φ(z)."""
    found: Tensor = torch.special.ndtr(z)
    return found


def response_slope(theta: Tensor, *, c: float, sigma: float) -> Tensor:
    """g'(θ) = Φ((1 − c − θ)/σ) − Φ((c − θ)/σ), in (0, 1): correction inflates a variance by 1/g'².

    >>> round(float(response_slope(torch.tensor(0.5), c=0.2, sigma=0.5)), 4)
    0.4515
    """
    check_margin(c)
    check_sigma(sigma)
    theta = theta.double()
    if sigma == 0:
        return torch.ones_like(theta)
    # Both sides of ½ give the same value; the tail with small terms keeps its digits.
    away = 0.5 - (theta - 0.5).abs()
    return _normal((1 - c - away) / sigma) - _normal((c - away) / sigma)


def inverse_response(mean: Tensor, *, c: float, sigma: float) -> Tensor:
    """g⁻¹ of a mean of bits, brought into [g(c), g(1 − c)] first: the θ that explains the mean.

    Exact where clients share θ. Where they differ, g⁻¹(mean g(θ)) is not mean θ (Jensen).
    By halving intervals; means of masks take few values, and each is solved for once.

    >>> theta = torch.tensor([0.2, 0.3, 0.8], dtype=torch.float64)
    >>> inverse_response(response(theta, c=0.2, sigma=0.5), c=0.2, sigma=0.5)
    tensor([0.2000, 0.3000, 0.8000], dtype=torch.float64)
    """
    check_margin(c)
    check_sigma(sigma)
    values, where = torch.unique(mean.double(), return_inverse=True)
    low, high = torch.full_like(values, c), torch.full_like(values, 1 - c)
    for _ in range(_HALVINGS if sigma > 0 else 0):
        middle = (low + high) / 2
        below = response(middle, c=c, sigma=sigma) < values
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    solved = (low + high) / 2 if sigma > 0 else values.clamp(c, 1 - c)
    # ½ is a fixed point, and one that rounding should not move.
    return torch.where(values == 0.5, values, solved)[where].reshape(mean.shape)


# --- how much noise --------------------------------------------------------------------------------------------------


def sensitivity(*, c: float, dimensions: int) -> float:
    """Δ = (1 − 2c)√d: from one corner of [c, 1 − c]^d to the opposite one, whatever the client's data are.

    >>> round(sensitivity(c=0.2, dimensions=5), 4)
    1.3416
    """
    check_margin(c)
    check_count("dimensions", dimensions)
    return (1 - 2 * c) * math.sqrt(dimensions)


def classical_sigma(*, epsilon: float, delta: float, sensitivity: float) -> float:
    """σ = Δ√(2 ln(1.25/δ))/ε (Dwork & Roth, 2014), which is proven for ε < 1 only and refused elsewhere.

    >>> round(classical_sigma(epsilon=0.5, delta=1e-5, sensitivity=1.0), 4)
    9.6896
    """
    _check(epsilon, delta, sensitivity)
    if epsilon >= 1:
        raise ConfigError(
            f"privacy: the classical bound σ = Δ√(2 ln(1.25/δ))/ε is proven for epsilon < 1 only, got {epsilon}; "
            "use the analytic Gaussian mechanism (analytic_sigma, calibration = 'analytic') or Rényi differential "
            "privacy (rdp_sigma, calibration = 'rdp'), which hold for every epsilon."
        )
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def rdp_sigma(*, epsilon: float, delta: float, sensitivity: float) -> float:
    """σ from Rényi differential privacy: min over α of αΔ²/2σ² + ln(1/δ)/(α − 1) = Δ²/2σ² + Δ√(2 ln(1/δ))/σ = ε.

    >>> round(rdp_sigma(epsilon=4.0, delta=1e-5, sensitivity=1.0), 4)
    1.2961
    """
    _check(epsilon, delta, sensitivity)
    # With s = Δ/σ and l = √(2 ln(1/δ)): s²/2 + ls = ε, solved in the form that loses no digits.
    length = math.sqrt(2 * math.log(1 / delta))
    return sensitivity * (length + math.sqrt(length * length + 2 * epsilon)) / (2 * epsilon)


def analytic_sigma(*, epsilon: float, delta: float, sensitivity: float) -> float:
    """The least σ that gives (ε, δ): the analytic Gaussian mechanism (Balle & Wang, 2018), for every ε > 0.

    >>> round(analytic_sigma(epsilon=4.0, delta=1e-5, sensitivity=1.0), 4)
    1.0812
    """
    _check(epsilon, delta, sensitivity)
    low, high = 0.0, rdp_sigma(epsilon=epsilon, delta=delta, sensitivity=sensitivity)  # a bound of its own
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = gaussian_delta(epsilon=epsilon, sigma=middle, sensitivity=sensitivity) <= delta
        low, high = (low, middle) if enough else (middle, high)
    return high


def gaussian_delta(*, epsilon: float, sigma: float, sensitivity: float) -> float:
    """δ of Gaussian noise for a given ε ≥ 0, exactly: Φ(Δ/2σ − εσ/Δ) − e^ε Φ(−Δ/2σ − εσ/Δ).

    >>> round(gaussian_delta(epsilon=1.0, sigma=1.0, sensitivity=1.0), 6)
    0.126937
    """
    check_sensitivity(sensitivity)
    if sigma == 0:
        return 1.0
    check_sigma(sigma)
    ratio = sensitivity / sigma
    ends = torch.tensor([ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio], dtype=torch.float64)
    upper, lower = torch.special.log_ndtr(ends).tolist()
    return max(0.0, math.exp(upper) - math.exp(min(epsilon + lower, 0.0)))


def _check(epsilon: float, delta: float, sensitivity: float) -> None:
    check_epsilon(epsilon)
    check_delta(delta)
    check_sensitivity(sensitivity)
