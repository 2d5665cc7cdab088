from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import parse
from laconic.codecs.sparsify import kept, largest
from laconic.core import Key, Shared, spec_of


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 50), st.floats(0, 1), st.sampled_from(["any", "sorted", "periodic"]))
def test_the_largest_and_of_equal_ones_the_first(size: int, different: int, share: float, order: str) -> None:
    scores = np.random.default_rng(size).integers(0, different, size).astype(np.float32)
    if order != "any":
        scores = np.sort(scores) if order == "sorted" else (np.arange(size) % 64 < 3).astype(np.float32)
    count = kept(size, share)
    expected = np.zeros(size, bool)
    expected[np.argsort(-scores, kind="stable")[:count]] = True
    assert np.array_equal(largest(scores, count), expected)


@pytest.mark.parametrize("text", ["topk:fraction=0.01", "threshold:level=2.5"])
def test_what_is_kept_is_exact_and_the_rest_is_zero(text: str) -> None:
    tree, shared = {"w": torch.randn(300, 40, generator=torch.Generator().manual_seed(0))}, Shared(Key.from_seed(0))
    blob, _ = parse(text).encode(tree, shared, {})
    decoded = parse(text).decode(blob, spec_of(tree), shared)["w"]
    chosen = decoded != 0
    assert torch.equal(decoded[chosen], tree["w"][chosen])
    assert float(tree["w"][~chosen].abs().max()) <= float(tree["w"][chosen].abs().min())
    assert int(chosen.sum()) == (120 if text.startswith("topk") else int((tree["w"].abs() > 2.5).sum()))


def test_the_random_pattern_is_another_with_another_key_and_costs_nothing() -> None:
    tree, codec = {"w": torch.ones(1000)}, parse("randk:fraction=0.1")
    first, second = (
        codec.decode(codec.encode(tree, shared, {})[0], spec_of(tree), shared)["w"]
        for shared in (Shared(Key.from_seed(0)), Shared(Key.from_seed(1)))
    )
    assert first.unique().tolist() == [0, 10]
    assert int((first != 0).sum()) == int((second != 0).sum()) == 100
    assert not torch.equal(first, second)
    assert len(codec.encode(tree, Shared(Key.from_seed(0)), {})[0]) == 400


def test_a_threshold_of_zero_loses_nothing() -> None:
    tree, shared = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(0))}, Shared(Key.from_seed(0))
    tree["w"][torch.arange(5000) % 10 != 3] = 0
    codec = parse("threshold:level=0")
    blob, _ = codec.encode(tree, shared, {})
    assert torch.equal(codec.decode(blob, spec_of(tree), shared)["w"], tree["w"])
    assert len(blob) < 500 * 4 + 330
