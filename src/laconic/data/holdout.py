"""Which examples to train on, and which to hold out for testing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from laconic.core import DataError, Key
from laconic.data.assignment import IntArray


def hold_out(strata: IntArray, *, fraction: float, key: Key, every: bool = False) -> tuple[IntArray, IntArray]:
    """Rows to train on and rows to test on, both in order, with `fraction` of every stratum in the test rows.

    Strata are classes, as a rule. With `every`, each stratum (a writer, say) is rounded by itself and is found on
    both sides, unless it has one row only; else the total is rounded, and strata come as near as they can.

    >>> train, test = hold_out(np.array([0, 0, 0, 0, 1, 1, 1, 1]), fraction=0.25, key=Key.from_seed(0))
    >>> len(train), sorted(test // 4)
    (6, [np.int64(0), np.int64(1)])
    """
    if not 0 <= fraction < 1:
        raise DataError(f"test_fraction must be at least 0 and below 1, got {fraction}.")
    _, numbers, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    if every:
        held = np.minimum(np.maximum(np.rint(sizes * fraction), 1 if fraction > 0 else 0), sizes - 1)
    else:
        held = np.diff(np.rint(np.cumsum(sizes) * fraction), prepend=0)
    order = np.lexsort((key.fold_in("hold_out").numpy().random(len(strata)), numbers))
    rank = np.arange(len(strata)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen: NDArray[np.bool_] = np.zeros(len(strata), dtype=np.bool_)
    chosen[order] = rank < np.repeat(held, sizes)
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def check_limit(limit: int | None, name: str) -> None:
    """Refuse to take no training examples, or fewer."""
    if limit is not None and limit < 1:
        raise DataError(f"{name}: limit must be at least 1, got {limit}.")
