"""The house codec: one step for all leaves, contexts, and as many bits as were asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from laconic.codecs.contexts import Cost, Dither, Layout, Levels, cost_of, layout_of, read_levels, write_levels
from laconic.codecs.draws import words
from laconic.codecs.stream import LARGEST, SMALLEST, Sink, Source, in_range
from laconic.codecs.vector import floating, from_vector, read_exact, to_vector, write_exact
from laconic.core import ConfigError, Key, PayloadError, Shared, Spec, Traits, Tree, resolve, spec_of

Mode = Literal["unbiased", "nearest"]
Values = npt.NDArray[np.float32]

_FINEST = 1 << 22  # steps up to the largest value
_SHRINK = 128  # what nearest levels lie from the mean of their values is said in parts of a step
_LAMBDA = 0.1  # what a bit is worth, in squared steps
_UP = 0.42  # above this part of a step, below the next level, a value that is not 0 is rounded down
_CLOSE = 0.004
_SLACK = 16.0  # bytes
_TRIALS = 40


class _Found(NamedTuple):
    """Levels in coding order, their step, how they were rounded, and how far below them their values are."""

    levels: Levels
    step: float
    shrink: tuple[int, int, int]
    dither: Dither | None


@dataclass(frozen=True)
class Lean:
    """A uniform quantizer with one step Δ for all leaves, whose levels are coded with contexts::

        x ≈ ±(k − s_k)·Δ        s_1, s_2, s_3 = s_4 = …

    One step for all is what minimises the squared error at a rate, be leaves as different as they like. `bits` per
    value and `nmse` are kept by search: `bits` within 1 % and 64 bytes.

    * `unbiased`: the level is ⌊x/Δ + u⌋ with u from the shared key, and s = 0. The mean over keys is x, whatever x is;
      and the receiver knows u, which says most of where levels are not 0, and of their signs.
    * `nearest`: the level of least D + λR, where R is what contexts make of it; s is where its values are in the mean.

    Without a mode it is unbiased, and nearest where what is lost is sent later: inside `ef(…)`, and on the way down.
    """

    bits: float | None = None
    nmse: float | None = None
    step: float | None = None
    mode: Mode | None = None
    text: str = ""
    id: int = 0

    def __post_init__(self) -> None:
        given = {"bits": self.bits, "nmse": self.nmse, "step": self.step}
        if sum(value is not None for value in given.values()) != 1:
            raise ConfigError(f"lean takes one of bits, nmse and step, got {_said(given) or 'none of them'}.")
        if self.bits is not None and not 0 < self.bits <= 16:
            raise ConfigError(f"lean: bits must be above 0 and at most 16, got {self.bits}.")
        if self.nmse is not None and not 1e-9 <= self.nmse < 1000:
            raise ConfigError(f"lean: nmse must be between 1e-9 and 1000, got {self.nmse}.")
        if self.nmse is not None and self.mode == "nearest" and self.nmse >= 1:
            raise ConfigError(f"lean: nearest levels have an nmse below 1, got {self.nmse}.")
        if self.step is not None and not SMALLEST <= self.step <= LARGEST:
            raise ConfigError(f"lean: step must be between 2^-100 and 2^100, got {self.step}.")

    @property
    def traits(self) -> Traits:
        """Unbiased or made for changes, as the mode is."""
        return Traits(unbiased=self.mode != "nearest")

    def with_memory(self) -> Lean:
        """The codec where what it loses is sent later."""
        return self if self.mode else replace(self, mode="nearest")

    def init_state(self, spec: Spec) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The payload of a tree."""
        sink, spec = Sink(), spec_of(tree)
        write_exact(tree, sink, shared.exact)
        names = floating(spec, shared.exact)
        values = to_vector({name: tree[name] for name in names})
        if len(values):
            layout = _layout(names)
            if found := self._found(values.numpy()[layout.order], layout, shared.key):
                sink.write_scale(found.step)
                sink.write(bytes([found.dither is not None]))
                if found.dither is None:
                    sink.write(np.array(found.shrink, np.int8).tobytes())
                write_levels(sink, found.levels, layout, found.dither)
            else:
                sink.write_scale(0.0)
        return sink.getvalue(), state

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """The tree that a payload stands for."""
        source = Source(blob)
        decoded = read_exact(source, spec, shared.exact)
        spec = resolve(spec, decoded)
        names = floating(spec, shared.exact)
        values = torch.zeros(sum(leaf.size for leaf in names.values()))
        if len(values) and (step := source.read_scale()):
            (dithered,) = source.read(1)
            if dithered > 1:
                raise PayloadError("coder", f"levels of kind {dithered}, which has no meaning here")
            shrink = np.zeros(3, np.int8) if dithered else np.frombuffer(source.read(3), np.int8)
            layout = _layout(names)
            dither = Dither.of(_draws(shared.key, len(values))) if dithered else None
            values.numpy()[layout.order] = _values(read_levels(source, layout, dither), step, shrink)
        source.finish()
        decoded |= from_vector(values, names)
        return {name: decoded[name] for name in spec}

    # --- the sender's choice ----------------------------------------------------------------------------------------

    def _found(self, values: Values, layout: Layout, key: Key) -> _Found | None:
        """Levels that keep what was asked for; None for zeros."""
        largest = float(np.abs(values).max())
        if in_range(largest) < SMALLEST:
            return None
        finest = max(largest / _FINEST, SMALLEST)
        draws = _draws(key, len(values)) if self.mode != "nearest" else None
        trial = _Trial(values, layout, draws)
        step = max(self.step or trial.rms, finest)
        for rough in (True, False) if draws is None else (False,):
            if self.bits is not None:
                step = _searched(trial.num_bytes, self.bits * len(values) / 8, step, finest, falls=True, rough=rough)
            elif self.nmse is not None:
                step = _searched(trial.nmse, self.nmse, step, finest, falls=False, rough=rough)
            if rough:
                trial.weigh(step)
        step = float(np.float32(step))
        levels, shrink = trial.levels(step)
        return _Found(levels, step, shrink, trial.dither) if levels.any() else None


def _draws(key: Key, size: int) -> npt.NDArray[np.uint32]:
    """How values are rounded, in coding order: numbers of 24 bits."""
    return words(key.fold_in("dither"), size) >> np.uint32(8)


def _layout(spec: Spec) -> Layout:
    return layout_of(tuple(tuple(leaf.shape) for leaf in spec.values()))


def _values(levels: Levels, step: float, shrink: npt.NDArray[np.int8]) -> Values:
    """What levels stand for."""
    below = np.concatenate([[0], shrink]).astype(np.float32)
    magnitudes = np.abs(levels)
    parts = magnitudes.astype(np.float32) * np.float32(_SHRINK) - np.take(below, np.minimum(magnitudes, 3))
    parts *= np.float32(np.float32(step) / np.float32(_SHRINK))
    return np.asarray(np.where(levels < 0, -parts, parts))


class _Trial:
    """Levels at any step, and what they cost and lose. Nearest levels depend on what bits cost: see `weigh`."""

    def __init__(self, values: Values, layout: Layout, draws: npt.NDArray[np.uint32] | None) -> None:
        self._values, self._layout = values, layout
        self._up = None if draws is None else draws.astype(np.float32) * np.float32(2.0**-24)
        self.dither = None if draws is None else Dither.of(draws)
        self._squares = float(np.einsum("i,i->", values, values, dtype=np.float64))
        self._least: Values | None = None  # in steps: what is below is not worth its bits

    @property
    def rms(self) -> float:
        """The size of values."""
        return math.sqrt(self._squares / len(self._values))

    def num_bytes(self, step: float) -> float:
        """About how long the payload is."""
        return 8 + cost_of(self.levels(step)[0], self._layout, self.dither).num_bytes

    def nmse(self, step: float) -> float:
        """‖x̂ − x‖²/‖x‖²."""
        levels, shrink = self.levels(step)
        error = _values(levels, step, np.array(shrink, np.int8)) - self._values
        return float(np.einsum("i,i->", error, error, dtype=np.float64)) / self._squares

    def weigh(self, step: float) -> None:
        """Learn from the levels at this step what is not worth its bits."""
        cost = cost_of(self.levels(step)[0], self._layout)
        self._least = np.take(_least(cost), cost.contexts)

    def levels(self, step: float) -> tuple[Levels, tuple[int, int, int]]:
        """Levels, and how far what they stand for lies below them."""
        scaled = self._values * np.float32(1 / step)
        if self._up is not None:
            return np.floor(scaled + self._up).astype(np.int32), (0, 0, 0)
        negative = scaled < 0
        np.abs(scaled, out=scaled)
        levels = (scaled + np.float32(_UP)).astype(np.int32)
        if self._least is not None:
            np.maximum(levels, 1, out=levels)
            levels *= scaled >= self._least
        shrink = _shrink(levels, scaled)
        return np.negative(levels, out=levels, where=negative), shrink


def _least(cost: Cost) -> npt.NDArray[np.float32]:
    """In each context, the smallest value in steps for which level 1 is worth its bits more than 0."""
    zero, one = cost.frequencies.probability(0), cost.frequencies.probability(1)
    coarse = one[np.arange(len(one)) // 5 * 5]
    bits = np.log2((1 - zero) / zero) + 1 - np.log2(1 - coarse)
    return np.maximum(0.5 + _LAMBDA / 2 * bits, 0.5).astype(np.float32)


def _shrink(levels: Levels, scaled: Values) -> tuple[int, int, int]:
    """For levels of 1, of 2 and of more, how far below them their values lie in the mean."""
    kind = np.minimum(levels, 3)
    count = np.bincount(kind, minlength=4)[1:]
    below = np.bincount(kind, levels - scaled, 4)[1:]
    one, two, more = np.clip(np.rint(_SHRINK * below / np.maximum(count, 1)), -127, 127).astype(int).tolist()
    return one, two, more


def _searched(
    figure: Callable[[float], float], target: float, step: float, finest: float, *, falls: bool, rough: bool
) -> float:
    """The step at which a figure, which falls or rises with the step, is the target or somewhat below it.

    By the secant between logarithms, within what has been ruled out; a rough search ends near the target.
    """
    sign = -1.0 if falls else 1.0
    good, bad = (math.inf, 0.0) if falls else (0.0, math.inf)  # the figure is at most the target, and above it
    slack = 0.06 * target if rough else max(_CLOSE * target, _SLACK if falls else 0.0)
    slope, before = 1.5 * sign, None
    for _ in range(_TRIALS):
        value = figure(step)
        if abs(target - value) <= slack and (rough or value <= target):
            return step
        good, bad = (step, bad) if value <= target else (good, step)
        if value <= target and falls and step <= finest:
            return step
        low, high = min(good, bad), max(good, bad)
        if low and high < low * 1.0001:
            break
        here = math.log(max(value, 1e-12)), math.log(step)
        if before is not None and here[1] != before[1]:
            measured = (here[0] - before[0]) / (here[1] - before[1])
            slope = measured if measured * sign > 0.1 else slope
        before = here
        move = (math.log(target) - _CLOSE / 2 - here[0]) / slope
        step *= math.exp(max(-2.0, min(2.0, move)))
        if not low < step < high:
            step = math.sqrt(low * high) if low and high < math.inf else (8 * low if low else high / 8)
        step = min(max(step, finest), LARGEST)
    return good if 0 < good < math.inf else step


def _said(given: dict[str, float | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
