"""The catalogue: every codec by name, a few lines each. `codecs.parse` reads them from text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, ParamSpec, TypeVar

from laconic.codecs.candidates import MinimalRandom
from laconic.codecs.compose import Coder, Pipeline, Stage
from laconic.codecs.dense import Floats
from laconic.codecs.entropy import Entropy
from laconic.codecs.factorize import LowRank
from laconic.codecs.lean import Lean, Mode
from laconic.codecs.masks import BitCoder, Coded, MaskModel, Plain
from laconic.codecs.naming import named
from laconic.codecs.quantize import Levels, LloydMax, Sign
from laconic.codecs.rotate import Rotate
from laconic.codecs.sparsify import RandomK, Threshold, TopK
from laconic.codecs.wire import CodecId
from laconic.core import Codec, ConfigError, Registry, Traits

P = ParamSpec("P")
Made = TypeVar("Made", Pipeline, Lean)
_ENTROPY, _PLAIN = Entropy(), Plain()
_LOSSLESS = Traits(exact=True, unbiased=True)
_EVERYTHING = Traits(exact=True, unbiased=True, dense=True, keeps_weights=True)
_ROUNDED = Traits(dense=True, keeps_weights=True)
_MEAN = Traits(unbiased=True)
_WEIGHTS = Traits(unbiased=True, keeps_weights=True)
_CHANGES = Traits()
_VOTES = Traits(literal=True)
_BITS = replace(_EVERYTHING, conditional=True)


def _entry(recipe: Callable[P, Made]) -> Callable[P, Made]:
    """Give what a recipe makes its canonical text and its number, from the recipe's own name and arguments.

    The text says what can be given by position, and of the rest what differs from its default. For the registry,
    everything can be given by keyword.
    """
    signature = inspect.signature(recipe)

    @functools.wraps(recipe)
    def build(*args: P.args, **kwargs: P.kwargs) -> Made:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        text = named(recipe.__name__, signature, given.arguments)
        return replace(recipe(*args, **kwargs), text=text, id=CodecId[recipe.__name__.upper()])

    keyword_only = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
    build.__signature__ = signature.replace(parameters=keyword_only)  # type: ignore[attr-defined]
    return build


def _codec(
    *stages: Stage, coder: Coder = _ENTROPY, per_leaf: bool = False, traits: Traits = _CHANGES, bits: BitCoder = _PLAIN
) -> Pipeline:
    return Pipeline(stages, coder, text="", id=CodecId.CUSTOM, per_leaf=per_leaf, traits=traits, bits=bits)


@_entry
def float32() -> Pipeline:
    """Every value as it is: 32 bits."""
    return _codec(coder=Floats("float32"), traits=_EVERYTHING)


@_entry
def float16() -> Pipeline:
    """Every value in half precision: 16 bits, ±65504 at most."""
    return _codec(coder=Floats("float16"), traits=_ROUNDED)


@_entry
def bfloat16() -> Pipeline:
    """Every value with the range of float32 and 8 bits of precision: 16 bits."""
    return _codec(coder=Floats("bfloat16"), traits=_ROUNDED)


@_entry
def signsgd(*, scale: Literal["mean", "unit"] = "mean", per_leaf: bool = False) -> Pipeline:
    """Signs, 1 bit (Bernstein et al., 2018): ± the mean magnitude, or ±1 with `scale = "unit"`."""
    return _codec(Sign(scale), per_leaf=per_leaf)


@_entry
def signsgd_mv(*, step: float = 1e-3) -> Pipeline:
    """Signs × `step`, 1 bit: as both links, a majority vote that moves clients by ±`step` (Bernstein et al., 2019)."""
    if not 2**-100 <= step <= 2**100:
        raise ConfigError(f"signsgd_mv: step must be positive, got {step}.")
    return _codec(Sign("unit", step), traits=_VOTES)


@_entry
def terngrad(*, clip: float = 2.5, per_leaf: bool = False) -> Pipeline:
    """Stochastic −1, 0, 1 times the largest value, clipped at `clip` deviations, 0 for off (Wen et al., 2017)."""
    return _codec(Levels(1, norm="max", clip=clip), per_leaf=per_leaf, traits=_CHANGES if clip else _MEAN)


@_entry
def qsgd(levels: int, *, per_leaf: bool = False) -> Pipeline:
    """Stochastic multiples of norm/levels, entropy coded (Alistarh et al., 2017)."""
    return _codec(Levels(levels, norm="l2"), per_leaf=per_leaf, traits=_MEAN)


@_entry
def int8(*, per_leaf: bool = False) -> Pipeline:
    """Stochastic multiples of 1/127 of the largest value: 8 bits at most."""
    return _codec(Levels(127, norm="max"), per_leaf=per_leaf, traits=_WEIGHTS)


@_entry
def drive(*, per_leaf: bool = False) -> Pipeline:
    """Signs after a random rotation, unbiased: 1 bit (Vargaftik et al., 2021)."""
    return _codec(Rotate(LloydMax(1)), per_leaf=per_leaf, traits=_MEAN)


@_entry
def drive_mse(*, per_leaf: bool = False) -> Pipeline:
    """Signs after a random rotation, scaled for the least squared error: 1 bit (Vargaftik et al., 2021)."""
    return _codec(Rotate(LloydMax(1), unbiased=False), per_leaf=per_leaf)


@_entry
def eden(bits: float, *, per_leaf: bool = False) -> Pipeline:
    """The best levels for Gaussian values after a random rotation, any real bits in (0, 8] (Vargaftik et al., 2022)."""
    if not 0 < bits <= 8:
        raise ConfigError(f"eden: bits must be above 0 and at most 8, got {bits}.")
    return _codec(Rotate(LloydMax(max(bits, 1)), fraction=min(bits, 1)), per_leaf=per_leaf, traits=_WEIGHTS)


@_entry
def topk(fraction: float, *, per_leaf: bool = False) -> Pipeline:
    """The fraction of largest magnitude, in float32 unless a codec follows; indices are coded."""
    return _codec(TopK(fraction), coder=Floats(), per_leaf=per_leaf, traits=_LOSSLESS if fraction == 1 else _CHANGES)


@_entry
def randk(fraction: float, *, per_leaf: bool = False) -> Pipeline:
    """A random fraction, unbiased; both ends draw the pattern, so indices cost nothing."""
    return _codec(RandomK(fraction), coder=Floats(), per_leaf=per_leaf, traits=_LOSSLESS if fraction == 1 else _MEAN)


@_entry
def threshold(level: float, *, per_leaf: bool = False) -> Pipeline:
    """What is above `level` in magnitude, in float32 unless a codec follows; `level=0` drops exact zeros only."""
    return _codec(Threshold(level), coder=Floats(), per_leaf=per_leaf, traits=_CHANGES if level else _LOSSLESS)


@_entry
def lowrank(rank: int) -> Pipeline:
    """Every matrix as a product of two with `rank` columns, in float32 unless a codec follows (Vogels et al., 2019)."""
    if rank < 1:
        raise ConfigError(f"lowrank: rank must be at least 1, got {rank}.")
    return _codec(LowRank(rank), coder=Floats(), per_leaf=True)


@_entry
def lean(
    *, bits: float | None = None, nmse: float | None = None, step: float | None = None, mode: Mode | None = None
) -> Lean:
    """One step for all leaves, contexts by row and column: so many bits a value in all, such an error, or that step."""
    return Lean(bits=bits, nmse=nmse, step=step, mode=mode)


@_entry
def mask(*, model: MaskModel = "shared") -> Pipeline:
    """Bits and counts entropy coded, with what both ends expect of them; float32 values unless a codec follows."""
    return _codec(coder=Floats(), bits=Coded(model), traits=_BITS)


@_entry
def mrc(*, bits: int = 8, kl: float = 5.0) -> Pipeline:
    """Bits as good as drawn from a sender's probabilities, `bits` for `kl` bits of divergence (Havasi et al., 2019)."""
    return _codec(coder=Floats(), bits=MinimalRandom(bits=bits, kl=kl), traits=replace(_EVERYTHING, draws=True))


_RECIPES: list[Callable[..., Codec]] = [float32, float16, bfloat16, int8, signsgd, signsgd_mv, terngrad, qsgd]
_RECIPES += [drive, drive_mse, eden, topk, randk, threshold, lowrank, lean, mask, mrc]
codecs = Registry("codec", _RECIPES)
"""Every codec that a configuration can name (besides compositions, `ef`, `by_leaf` and users' own)."""
