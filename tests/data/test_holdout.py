from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laconic.core import Key
from laconic.data.holdout import hold_out


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=100),
    st.floats(0, 0.95),
    st.booleans(),
    st.integers(0, 5),
)
def test_every_row_is_on_one_side(strata: list[int], fraction: float, every: bool, seed: int) -> None:
    array = np.array(strata)
    train, test = hold_out(array, fraction=fraction, key=Key.from_seed(seed), every=every)
    assert sorted([*train, *test]) == list(range(len(strata)))
    if not every:
        assert abs(len(test) - fraction * len(strata)) <= 0.5
    for stratum in np.unique(array):
        total, held = int((array == stratum).sum()), int((array[test] == stratum).sum())
        assert abs(held - fraction * total) <= 1
        if every and fraction > 0:
            assert total - held >= 1
            assert held >= 1 or total == 1
