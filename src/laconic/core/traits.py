"""What a codec says about itself: whether values, their mean and whole weights come through."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.errors import ConfigError
from laconic.core.protocols import Codec


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a codec does to floating-point values, in general: whatever the values, and for every message.

    A codec that declares nothing is made for changes, as all of these are false.

    >>> Traits(unbiased=True, keeps_weights=True) & Traits(unbiased=True)
    Traits(exact=False, unbiased=True, dense=False, keeps_weights=False, conditional=False, literal=False, draws=False)
    """

    exact: bool = False
    """Every float32 value comes back as it is."""
    unbiased: bool = False
    """What comes back is, in the mean over keys, what was sent."""
    dense: bool = False
    """Every value travels by itself, in floating point: on the way down, whole weights are sent and not changes."""
    keeps_weights: bool = False
    """Weights themselves come through well enough, not only changes of them."""
    conditional: bool = False
    """Leaves of integers are written given what the receiver holds of them (`Shared.held`)."""
    literal: bool = False
    """What comes back is meant as it is, a vote of ±step: on the way down it is never scaled."""
    draws: bool = False
    """It takes probabilities in place of bits, and which bits are drawn is its own affair (`Leaf.bernoulli`)."""

    def __post_init__(self) -> None:
        if (self.exact and not self.unbiased) or (self.dense and not self.keeps_weights):
            raise ConfigError(f"what is exact is unbiased, and what is dense keeps weights, got {self}.")

    def __and__(self, other: Traits) -> Traits:
        """What is true of both: of one codec after another, or of some leaves by one and the rest by another.

        `conditional`, `literal` and `draws` are true of the whole where they are of a part.
        """
        return Traits(
            exact=self.exact and other.exact,
            unbiased=self.unbiased and other.unbiased,
            dense=self.dense and other.dense,
            keeps_weights=self.keeps_weights and other.keeps_weights,
            conditional=self.conditional or other.conditional,
            literal=self.literal or other.literal,
            draws=self.draws or other.draws,
        )


def traits_of(codec: Codec) -> Traits:
    """The traits of a codec, `codec.traits`; of one that declares none, those of a codec made for changes."""
    traits = getattr(codec, "traits", None)
    return traits if isinstance(traits, Traits) else Traits()
