"""`MaskPrivacy`: what a method that sends masks needs to send them privately."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from laconic.core import ConfigError, Key
from laconic.privacy.accounting import (
    ORDERS,
    amplified_rdp,
    epsilon_from_rdp,
    gaussian_epsilon,
    least_probability,
    mask_delta,
    mask_epsilon,
)
from laconic.privacy.mechanisms import (
    analytic_sigma,
    classical_sigma,
    clip,
    inverse_response,
    privatize,
    rdp_sigma,
    sensitivity,
)
from laconic.privacy.ranges import check_count, check_delta, check_epsilon, check_margin, check_sigma

_HALVINGS = 60


@dataclass(frozen=True)
class Spent:
    """What a client has given away in `rounds` masks: (`epsilon`, `delta`), and the same by looser arguments.

    `epsilon` is exact for the mechanism. `amplified` is min{ε_R(α), d·r_α(c)} summed over rounds and converted, as the
    paper argues; `unamplified` is what the noise alone would guarantee if noisy probabilities were sent (infinite
    without noise).
    """

    epsilon: float
    delta: float
    rounds: int
    amplified: float
    unamplified: float


@dataclass(frozen=True)
class MaskPrivacy:
    """Differential privacy for masks: a client draws the one mask that it sends from `randomize(θ, key)`.

    θ ∈ [c, 1 − c]^d → θ + N(0, σ²) → clip to [c, 1 − c] → one Bernoulli mask (Isik et al., 2023, appendix C). Give
    `sigma`, or `epsilon` for one round and let `bind` find σ by `calibration`:

    | calibration | ε is that of |
    |---|---|
    | `mask` | the released mask, exactly (the least noise) |
    | `analytic` | noisy probabilities, exactly (Balle & Wang, 2018) |
    | `rdp` | noisy probabilities, by Rényi's bound |
    | `classical` | noisy probabilities, ε < 1 only |

    How a method uses it::

        privacy = privacy.bind(d)                        # once: d bits in a mask
        mask = draw(privacy.randomize(theta, key), key2) # client, its last step; one draw per call
        theta = privacy.corrected(mean_of_masks)         # server
        privacy.spent(rounds_that_a_client_took_part_in)

    Above `sigma_max`, `corrected` leaves the bias in: correction inflates the variance by 1/g'², which few clients and
    much noise make worse than the bias. With differing clients it carries a Jensen term (docs/privacy.md).

    >>> privacy = MaskPrivacy(c=0.2, epsilon=4.0, delta=1e-4).bind(5)
    >>> round(privacy.spent(1).epsilon, 3), round(privacy.spent(1).unamplified, 3)
    (1.099, 4.0)
    """

    c: float
    sigma: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    calibration: Literal["mask", "analytic", "rdp", "classical"] = "analytic"
    correct_bias: bool = True
    sigma_max: float | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        check_margin(self.c)
        check_delta(self.delta)
        if self.sigma is None and self.epsilon is None:
            raise ConfigError("privacy: give sigma (the noise) or epsilon (the budget of one round).")
        if self.sigma is not None and self.epsilon is not None and self.dimensions is None:
            raise ConfigError("privacy: give sigma or epsilon, not both; one follows from the other.")
        if self.sigma is not None:
            check_sigma(self.sigma)
        if self.epsilon is not None:
            check_epsilon(self.epsilon)
        if self.sigma_max is not None:
            check_sigma(self.sigma_max)
        if self.calibration not in ("mask", "analytic", "rdp", "classical"):
            raise ConfigError(
                f"privacy: calibration must be 'mask', 'analytic', 'rdp' or 'classical', got {self.calibration!r}."
            )
        if self.epsilon is not None and self.calibration == "classical":
            # Refused here, where the setting is made, rather than when the model's size is known.
            classical_sigma(epsilon=self.epsilon, delta=self.delta, sensitivity=1.0)
        if self.dimensions is not None:
            check_count("dimensions", self.dimensions)

    def bind(self, dimensions: int) -> MaskPrivacy:
        """The same for masks of so many bits, with σ known."""
        check_count("dimensions", dimensions)
        return replace(self, dimensions=dimensions, sigma=self._sigma_for(dimensions))

    def clip(self, theta: Tensor) -> Tensor:
        """θ brought into [c, 1 − c]."""
        return clip(theta, c=self.c)

    def randomize(self, theta: Tensor, key: Key) -> Tensor:
        """Noisy, clipped probabilities to draw one mask from; a second mask would cost a second round."""
        return privatize(theta, key, c=self.c, sigma=self._bound_sigma())

    def corrected(self, mean_mask: Tensor) -> Tensor:
        """θ from a mean of masks: g⁻¹ of it, or only clipped where correction is off; in the mean's own dtype."""
        sigma = self._bound_sigma()
        if not self.correct_bias or (self.sigma_max is not None and sigma > self.sigma_max):
            return self.clip(mean_mask)
        # The clip comes last: rounding to a shorter dtype must not leave the interval.
        return self.clip(inverse_response(mean_mask, c=self.c, sigma=sigma).to(mean_mask.dtype))

    def spent(self, rounds: int) -> Spent:
        """What a client that sent a mask in so many rounds has given away."""
        check_count("rounds", rounds)
        if self.dimensions is None:
            raise RuntimeError("MaskPrivacy does not know the number of bits yet: call bind(dimensions) first.")
        sigma, dimensions = self._bound_sigma(), self.dimensions
        noise = {"c": self.c, "sigma": sigma}
        paper = rounds * amplified_rdp(**noise, dimensions=dimensions)
        distance = sensitivity(c=self.c, dimensions=dimensions)
        return Spent(
            epsilon=mask_epsilon(probability=least_probability(**noise), bits=rounds * dimensions, delta=self.delta),
            delta=self.delta,
            rounds=rounds,
            amplified=epsilon_from_rdp(ORDERS, paper, self.delta).epsilon,
            unamplified=gaussian_epsilon(sigma=sigma, delta=self.delta, sensitivity=distance, rounds=rounds),
        )

    def _bound_sigma(self) -> float:
        if self.sigma is None:
            raise RuntimeError("MaskPrivacy does not know its noise yet: call bind(dimensions) first.")
        return self.sigma

    def _sigma_for(self, dimensions: int) -> float:
        if self.epsilon is None:
            return self._bound_sigma()
        distance = sensitivity(c=self.c, dimensions=dimensions)
        if self.calibration == "mask":
            return self._mask_sigma(self.epsilon, dimensions, distance)
        formula = {"analytic": analytic_sigma, "rdp": rdp_sigma, "classical": classical_sigma}[self.calibration]
        return formula(epsilon=self.epsilon, delta=self.delta, sensitivity=distance)

    def _mask_sigma(self, epsilon: float, dimensions: int, distance: float) -> float:
        """The least σ with which a mask costs at most ε; 0 where drawing bits is private enough."""

        def enough(sigma: float) -> bool:
            least = least_probability(c=self.c, sigma=sigma)
            return mask_delta(probability=least, bits=dimensions, epsilon=epsilon) <= self.delta

        if enough(0.0):
            return 0.0
        # Enough for noisy probabilities is enough for what is made of them.
        low, high = 0.0, analytic_sigma(epsilon=epsilon, delta=self.delta, sensitivity=distance)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high
