"""What privacy's parameters may be; whoever takes one checks it here."""

from __future__ import annotations

import math

from laconic.core import ConfigError


def check_margin(c: float) -> None:
    """Probabilities are kept in [c, 1 − c]: 0 < c < ½."""
    if not 0 < c < 0.5:
        raise ConfigError(f"privacy: c must lie strictly between 0 and 0.5, got {c}; θ is kept in [c, 1 − c].")


def check_sigma(sigma: float) -> None:
    """A standard deviation: finite and ≥ 0."""
    if not 0 <= sigma < math.inf:
        raise ConfigError(f"privacy: sigma must be finite and ≥ 0, got {sigma}.")


def check_epsilon(epsilon: float) -> None:
    """A budget: finite and > 0."""
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"privacy: epsilon must be finite and > 0, got {epsilon}.")


def check_delta(delta: float) -> None:
    """The probability with which the budget may be exceeded: 0 < δ < 1."""
    if not 0 < delta < 1:
        raise ConfigError(
            f"privacy: delta must lie strictly between 0 and 1, got {delta}; usual is less than 1 / clients."
        )


def check_sensitivity(sensitivity: float) -> None:
    """A distance: finite and > 0."""
    if not 0 < sensitivity < math.inf:
        raise ConfigError(f"privacy: the sensitivity must be finite and > 0, got {sensitivity}.")


def check_count(what: str, count: int) -> None:
    """A number of bits, rounds or steps: ≥ 1."""
    if count < 1:
        raise ConfigError(f"privacy: {what} must be at least 1, got {count}.")
