"""How much one reply may count, whatever the method: a bound on its norm, and one on the weight that it claims.

Both hold on the server, after decoding and before the M-step:

    x ← x · min(1, C / ‖x‖)          examples ← min(examples, N)

`C` and `N` are numbers, or follow from the cohort: `RATIO` times the median of its replies. So less than half of a
cohort cannot move them far, and replies that are like each other pass as they are, bit for bit. Weights that are
`ABSURD` times the median are refused like any other reply that is not honest.

What is not of one kind has a norm of its own: the model's weights, its running statistics, and what a companion sends
beside them (control variates). The last two are `ABSURD` times the median at the most: who joins late sends more of
them than who has sent them before. Bits have no norm: there a reply is a vote.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from laconic.core import ClientInfo, ConfigError, Reply, Spec

Limit = float | Literal["auto", "off"]
Refuse = Callable[[ClientInfo, str, str], None]
RATIO = 3.0
"""How many times the median of a cohort's replies one may count."""
ABSURD = 30.0
"""How many times the median norm a reply may have before it is refused."""
_WINDOW = 16  # replies that wait for a median before the first is folded: bounds what waits in memory
_WEIGHTS, _EXAMPLES = "", "#examples"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one reply may count at most: `"auto"` is so many times the median of the cohort's, `"off"` any.

    >>> Bounds(max_norm=0.0)
    Traceback (most recent call last):
        ...
    laconic.core.errors.ConfigError: run.max_norm must be a positive number, 'auto' or 'off', got 0.0.
    """

    max_norm: Limit = "auto"
    max_weight: Limit = "auto"

    def __post_init__(self) -> None:
        for name in ("max_norm", "max_weight"):
            value = getattr(self, name)
            if value not in ("auto", "off") and (isinstance(value, str) or not 0 < value < math.inf):
                raise ConfigError(f"run.{name} must be a positive number, 'auto' or 'off', got {value!r}.")
        if not isinstance(self.max_weight, str) and self.max_weight < 1:
            raise ConfigError(f"run.max_weight counts examples and must be at least 1, got {self.max_weight}.")


UNBOUNDED = Bounds(max_norm="off", max_weight="off")
"""Whatever a reply says counts."""


class _Measured(NamedTuple):
    """A reply, with the norm of each of its parts and the examples that it claims."""

    reply: Reply
    figures: Mapping[str, float]


def within(replies: Iterable[Reply], bounds: Bounds, spec: Spec, refuse: Refuse) -> Iterator[Reply]:
    """The replies in order, each within bounds; `spec` is the model's.

    A median is that of the first 16 replies and of all that have come since: memory does not grow with the cohort.
    """
    if bounds == UNBOUNDED:
        yield from replies
        return
    cohort: dict[str, list[float]] = {}
    measured = (_measured(reply, spec, cohort) for reply in replies)
    for one in itertools.chain(list(itertools.islice(measured, _WINDOW)), measured):
        if (reply := _counted(one, bounds, spec, cohort, refuse)) is not None:
            yield reply


def _measured(reply: Reply, spec: Spec, cohort: dict[str, list[float]]) -> _Measured:
    """Measure a reply; the figures of the `cohort`, in order, gain its own."""
    squares: dict[str, float] = {}
    for name, leaf in reply.message.items():
        if leaf.is_floating_point():
            part, norm = _part(name, spec), float(torch.linalg.vector_norm(leaf, dtype=torch.float64))
            squares[part] = squares.get(part, 0.0) + norm * norm
    figures = {part: math.sqrt(square) for part, square in squares.items()}
    figures[_EXAMPLES] = float(reply.client.examples)
    for part, figure in figures.items():
        if figure:  # where most clients change nothing, those that do are compared with each other
            insort(cohort.setdefault(part, []), figure)
    return _Measured(reply, figures)


def _counted(
    measured: _Measured, bounds: Bounds, spec: Spec, cohort: Mapping[str, list[float]], refuse: Refuse
) -> Reply | None:
    """The reply as it counts: the very same where it is within bounds, none where it is refused."""
    reply, scales = measured.reply, dict[str, float]()
    for part, figure in measured.figures.items():
        limit = bounds.max_weight if part == _EXAMPLES else bounds.max_norm
        if limit == "off" or not figure:
            continue
        if limit == "auto":
            median = cohort[part][(len(cohort[part]) - 1) // 2]
            limit = (RATIO if part in (_WEIGHTS, _EXAMPLES) else ABSURD) * median
            if part == _WEIGHTS and figure > ABSURD * median:
                refuse(reply.client, "norm", f"a norm of {figure:.3g}, but the median of the cohort is {median:.3g}")
                return None
        if figure > limit:
            scales[part] = limit / figure
    if not scales:
        return reply
    if _EXAMPLES in scales:
        examples = max(1, int(scales.pop(_EXAMPLES) * reply.client.examples))
        reply = replace(reply, client=replace(reply.client, examples=examples))
    floats = (name for name, leaf in reply.message.items() if leaf.is_floating_point())
    factors = {name: scales[part] for name in floats if (part := _part(name, spec)) in scales}
    return replace(reply, message={**reply.message, **{n: reply.message[n] * factor for n, factor in factors.items()}})


def _part(name: str, spec: Spec) -> str:
    """What a leaf of a message is a part of: what it stands under, and whether it is a running statistic."""
    under, _, leaf = name.rpartition("/")
    return f"{under}/running" if leaf in spec and spec[leaf].exact else under
