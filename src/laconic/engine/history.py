"""A run's records as a curve, as a picture, and as a data frame."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.core import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


class Point(NamedTuple):
    """What an evaluation found, and the bytes that had been sent until then, both ways."""

    round: int
    num_bytes: int
    value: float


def curve(history: Iterable[Mapping[str, Any]], metric: str = "global_accuracy") -> list[Point]:
    """A metric against cumulative bytes: a point for every record that has it.

    >>> sent = {"bytes_up": 5, "bytes_down": 6}
    >>> curve([{"round": 1, **sent}, {"round": 2, **sent, "auc": 0.9}], "auc")
    [Point(round=2, num_bytes=22, value=0.9)]
    """
    records = list(history)
    sent = itertools.accumulate(record["bytes_up"] + record["bytes_down"] for record in records)
    return [
        Point(record["round"], num_bytes, record[metric])
        for record, num_bytes in zip(records, sent, strict=True)
        if record.get(metric) is not None
    ]


def bytes_to_reach(history: Iterable[Mapping[str, Any]], target: float, metric: str = "global_accuracy") -> int | None:
    """Bytes both ways until an evaluation first found at least `target`; None where none did."""
    return next((point.num_bytes for point in curve(history, metric) if point.value >= target), None)


def plot(
    histories: Mapping[str, Sequence[Iterable[Mapping[str, Any]]]],
    *,
    metric: str = "global_accuracy",
    axes: Axes | None = None,
) -> Axes:
    """Draw a metric against cumulative bytes: a line for each name, the mean of its histories, and each of them thinly.

    Needs matplotlib, which the extra `report` brings.
    """
    curves = {name: [curve(history, metric) for history in several] for name, several in histories.items()}
    if not any(points for several in curves.values() for points in several):
        raise ConfigError(f"plot: no record has {metric!r}; was it evaluated?")
    if axes is None:
        axes = needed("matplotlib.pyplot", "drawing").subplots(layout="constrained")[1]
    for name, several in curves.items():
        means = [
            tuple(sum(column) / len(points) for column in list(zip(*points, strict=True))[1:])
            for points in zip(*several, strict=False)
        ]
        (line,) = axes.plot([x for x, _ in means], [y for _, y in means], label=name)
        if len(several) > 1:
            for points in several:
                x, y = [point.num_bytes for point in points], [point.value for point in points]
                axes.plot(x, y, color=line.get_color(), alpha=0.3, linewidth=0.7)
    axes.set_xscale("log")
    axes.set_xlabel("bytes up and down")
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    return axes


def frame(history: Sequence[Mapping[str, Any]]) -> DataFrame:
    """The records as a pandas data frame by round, with the bytes so far in `bytes_total`. Needs pandas."""
    made = needed("pandas", "a data frame").DataFrame(list(history)).set_index("round")
    made["bytes_total"] = (made["bytes_up"] + made["bytes_down"]).cumsum()
    return made


def needed(module: str, what: str, *, extra: str = "report") -> Any:
    """An optional library's module, or one sentence that says how to get it."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise ConfigError(f'{what} needs {library}; run: pip install "laconic[{extra}]"') from None
