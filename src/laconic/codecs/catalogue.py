"""The catalogue: every codec by name, a few lines each, and the text in which a configuration names them.

::

    "eden:bits=2"                          a name and its settings
    "topk:fraction=0.01 | eden:bits=4"     one after the other; as a list too: ["topk:fraction=0.01", "eden:bits=4"]
    "ef(signsgd)"                          with error feedback
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, ParamSpec

from laconic.codecs.compose import Coder, Pipeline, Stage
from laconic.codecs.dense import Floats
from laconic.codecs.entropy import Entropy
from laconic.codecs.feedback import ef
from laconic.codecs.masks import Coded, MaskModel
from laconic.codecs.quantize import Levels, LloydMax, Sign
from laconic.codecs.rotate import Rotate
from laconic.codecs.sparsify import RandomK, Threshold, TopK
from laconic.codecs.wire import CodecId
from laconic.core import Codec, ConfigError, Registry, did_you_mean

P = ParamSpec("P")
_ENTROPY = Entropy()


def _entry(recipe: Callable[P, Pipeline]) -> Callable[P, Pipeline]:
    """Give what a recipe makes its canonical text and its number, from the recipe's own name and arguments.

    The text says what can be given by position, and of the rest what differs from its default. For the registry,
    everything can be given by keyword.
    """
    signature = inspect.signature(recipe)

    @functools.wraps(recipe)
    def build(*args: P.args, **kwargs: P.kwargs) -> Pipeline:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        settings = ",".join(
            f"{name}={_value_text(value)}"
            for name, value in given.arguments.items()
            if signature.parameters[name].default != value
        )
        text = f"{recipe.__name__}:{settings}" if settings else recipe.__name__
        return replace(recipe(*args, **kwargs), text=text, id=CodecId[recipe.__name__.upper()])

    keyword_only = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
    build.__signature__ = signature.replace(parameters=keyword_only)  # type: ignore[attr-defined]
    return build


def _codec(*stages: Stage, coder: Coder = _ENTROPY, per_leaf: bool = False) -> Pipeline:
    return Pipeline(stages, coder, text="", id=CodecId.CUSTOM, per_leaf=per_leaf)


@_entry
def float32() -> Pipeline:
    """Every value as it is: 32 bits."""
    return _codec(coder=Floats("float32"))


@_entry
def float16() -> Pipeline:
    """Every value in half precision: 16 bits, ±65504 at most."""
    return _codec(coder=Floats("float16"))


@_entry
def bfloat16() -> Pipeline:
    """Every value with the range of float32 and 8 bits of precision: 16 bits."""
    return _codec(coder=Floats("bfloat16"))


@_entry
def signsgd(*, scale: Literal["mean", "unit"] = "mean", per_leaf: bool = False) -> Pipeline:
    """Signs, 1 bit (Bernstein et al., 2018): ± the mean magnitude, or ±1 with `scale = "unit"`."""
    return _codec(Sign(scale), per_leaf=per_leaf)


@_entry
def signsgd_mv(*, step: float = 1e-3) -> Pipeline:
    """Signs × `step`, 1 bit: as both links, a majority vote that moves clients by ±`step` (Bernstein et al., 2019)."""
    if not 2**-100 <= step <= 2**100:
        raise ConfigError(f"signsgd_mv: step must be positive, got {step}.")
    return _codec(Sign("unit", step))


@_entry
def terngrad(*, clip: float = 2.5, per_leaf: bool = False) -> Pipeline:
    """Stochastic −1, 0, 1 times the largest value, clipped at `clip` deviations, 0 for off (Wen et al., 2017)."""
    return _codec(Levels(1, norm="max", clip=clip), per_leaf=per_leaf)


@_entry
def qsgd(levels: int, *, per_leaf: bool = False) -> Pipeline:
    """Stochastic multiples of norm/levels, entropy coded (Alistarh et al., 2017)."""
    return _codec(Levels(levels, norm="l2"), per_leaf=per_leaf)


@_entry
def int8(*, per_leaf: bool = False) -> Pipeline:
    """Stochastic multiples of 1/127 of the largest value: 8 bits at most."""
    return _codec(Levels(127, norm="max"), per_leaf=per_leaf)


@_entry
def drive(*, per_leaf: bool = False) -> Pipeline:
    """Signs after a random rotation, unbiased: 1 bit (Vargaftik et al., 2021)."""
    return _codec(Rotate(), Sign("unbiased"), per_leaf=per_leaf)


@_entry
def drive_mse(*, per_leaf: bool = False) -> Pipeline:
    """Signs after a random rotation, scaled for the least squared error: 1 bit (Vargaftik et al., 2021)."""
    return _codec(Rotate(), Sign("mean"), per_leaf=per_leaf)


@_entry
def eden(bits: float, *, per_leaf: bool = False) -> Pipeline:
    """The best levels for Gaussian values after a random rotation, any real bits in (0, 8] (Vargaftik et al., 2022)."""
    if not 0 < bits <= 8:
        raise ConfigError(f"eden: bits must be above 0 and at most 8, got {bits}.")
    thin = () if bits >= 1 else (RandomK(bits),)
    return _codec(Rotate(), *thin, LloydMax(max(bits, 1)), per_leaf=per_leaf)


@_entry
def topk(fraction: float, *, per_leaf: bool = False) -> Pipeline:
    """The fraction of largest magnitude, in float32 unless a codec follows; indices are coded."""
    return _codec(TopK(fraction), coder=Floats(), per_leaf=per_leaf)


@_entry
def randk(fraction: float, *, per_leaf: bool = False) -> Pipeline:
    """A random fraction, unbiased; both ends draw the pattern, so indices cost nothing."""
    return _codec(RandomK(fraction), coder=Floats(), per_leaf=per_leaf)


@_entry
def threshold(level: float, *, per_leaf: bool = False) -> Pipeline:
    """What is above `level` in magnitude, in float32 unless a codec follows; `level=0` drops exact zeros only."""
    return _codec(Threshold(level), coder=Floats(), per_leaf=per_leaf)


@_entry
def mask(*, model: MaskModel = "shared") -> Pipeline:
    """Bits and counts entropy coded, with what both ends expect of them; float32 values unless a codec follows."""
    return replace(_codec(coder=Floats()), bits=Coded(model), values_id=CodecId.FLOAT32)


_RECIPES: list[Callable[..., Codec]] = [float32, float16, bfloat16, int8, signsgd, signsgd_mv, terngrad, qsgd]
_RECIPES += [drive, drive_mse, eden, topk, randk, threshold, mask]
codecs = Registry("codec", _RECIPES)
"""Every codec that a configuration can name (besides compositions and `ef`)."""


def parse(text: str | Sequence[str]) -> Codec:
    """The codec that a configuration names.

    >>> parse("float16").text
    'float16'
    >>> parse("flaot16")
    Traceback (most recent call last):
        ...
    laconic.core.errors.ConfigError: unknown codec 'flaot16'; did you mean 'float16'?
    """
    whole = text if isinstance(text, str) else " | ".join(text)
    parts = [_parse_one(part.strip(), whole) for part in _split(whole, "|")]
    codec = parts[0]
    for then in parts[1:]:
        if not isinstance(codec, Pipeline) or not isinstance(then, Pipeline):
            raise ConfigError(f"[codec] {whole}: ef(…) wraps a whole codec; write ef(a | b).")
        codec = codec | then
    return codec


def _parse_one(text: str, whole: str) -> Codec:
    if wrapped := re.fullmatch(r"ef\s*\((.*)\)", text, re.DOTALL):
        return ef(parse(wrapped[1]))
    name, _, settings = text.partition(":")
    name = name.strip()
    if name not in codecs:
        raise ConfigError(f"unknown codec {name!r}; {did_you_mean(name, [*codecs, 'ef'])}")
    pairs = [pair.partition("=") for pair in settings.split(",")] if settings.strip() else []
    for key, equals, value in pairs:
        if [other.strip() for other, _, _ in pairs].count(key.strip()) > 1:
            raise ConfigError(f"[codec] {whole}: {key.strip()!r} is given twice.")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(
                f"[codec] {whole}: settings are written key=value, got {(key + equals + value).strip()!r}."
            )
    return codecs.build(name, {key.strip(): _value(value.strip()) for key, _, value in pairs})


def _split(text: str, separator: str) -> list[str]:
    """Cut at the separators that stand outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and not depth:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ConfigError(f"[codec] {text}: the parentheses don't match.")
    return parts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _value_text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
