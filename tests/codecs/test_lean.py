"""The house codec: exact rates, no bias where there must be none, contexts that are worth their time."""

from __future__ import annotations

import contextlib
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import (
    Layout,
    Source,
    eden,
    ef,
    layout_of,
    lean,
    measure,
    parse,
    read_levels,
    with_memory,
    write_levels,
)
from laconic.codecs.contexts import LARGEST_LEVEL
from laconic.codecs.stream import Sink
from laconic.core import Codec, ConfigError, Key, PayloadError, Shared, Tree, spec_of
from laconic.engine.round import Link

KEY = Key.from_seed(3)


def active(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A change as matrices have them: rows and columns that are loud or silent, leaves of different scale."""
    random = torch.Generator().manual_seed(seed)
    row, column = (torch.exp(0.7 * torch.randn(side, generator=random)) for side in (rows, columns))
    return torch.outer(row, column) * torch.randn(rows, columns, generator=random)


def nmse(codec: Codec, tree: Tree) -> tuple[float, float]:
    """Bits per value, and the error."""
    blob, _ = codec.encode(tree, Shared(KEY), {})
    back = codec.decode(blob, spec_of(tree), Shared(KEY))
    error = sum(float((back[n].double() - tree[n].double()).square().sum()) for n in tree)
    return 8 * len(blob) / sum(v.numel() for v in tree.values()), error / sum(
        float(v.double().square().sum()) for v in tree.values()
    )


# --- rates ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    bits=st.floats(0.01, 8),
    size=st.integers(1, 3000),
    power=st.sampled_from([0, 1, 3, 9]),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
    zeros=st.floats(0, 1),
    mode=st.sampled_from(["unbiased", "nearest"]),
    seed=st.integers(0, 1000),
)
def test_bits_are_never_exceeded(
    bits: float, size: int, power: int, scale: float, zeros: float, mode: str, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=random).pow(power) * scale
    values[torch.rand(size, generator=random) < zeros] = 0
    blob, _ = parse(f"lean:bits={bits},mode={mode}").encode({"w": values}, Shared(Key.from_seed(seed)), {})
    assert len(blob) <= 1.01 * bits * size / 8 + 64


@pytest.mark.parametrize("bits", [0.05, 0.3, 1, 3, 9])
@pytest.mark.parametrize("mode", ["unbiased", "nearest"])
def test_bits_are_used(bits: float, mode: str) -> None:
    tree = {"w": active(200, 300), "b": 0.1 * torch.randn(300, generator=torch.Generator().manual_seed(1))}
    blob, _ = parse(f"lean:bits={bits},mode={mode}").encode(tree, Shared(KEY), {})
    assert abs(len(blob) - bits * 60_300 / 8) <= 0.01 * bits * 60_300 / 8 + 64


@pytest.mark.parametrize("values", [torch.zeros(500), torch.ones(500), torch.tensor([0.7]), torch.zeros(3, 0)])
@pytest.mark.parametrize("bits", [0.01, 0.5, 8])
def test_bits_of_what_says_little(values: torch.Tensor, bits: float) -> None:
    blob, _ = lean(bits=bits).encode({"w": values}, Shared(KEY), {})
    assert len(blob) <= 1.01 * bits * values.numel() / 8 + 64


@pytest.mark.parametrize("mode", ["unbiased", "nearest"])
@pytest.mark.parametrize("goal", [0.5, 0.1, 0.01])
def test_nmse_is_kept(goal: float, mode: str) -> None:
    _, error = nmse(parse(f"lean:nmse={goal},mode={mode}"), {"w": active(200, 300)})
    assert 0.95 * goal <= error <= goal * 1.001


def test_a_step_is_the_step() -> None:
    blob, _ = lean(step=0.125).encode({"w": torch.randn(1000)}, Shared(KEY), {})
    back = lean(step=0.125).decode(blob, spec_of({"w": torch.zeros(1000)}), Shared(KEY))["w"]
    assert torch.equal(back * 8, (back * 8).round())


# --- bias -------------------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "normal": lambda d, g: torch.randn(d, generator=g),
    "heavy": lambda d, g: torch.randn(d, generator=g) ** 5,
    "spike": lambda d, g: torch.cat([torch.full((1,), 30.0), 0.1 * torch.randn(d - 1, generator=g)]),
    "sparse": lambda d, g: torch.randn(d, generator=g) * (torch.rand(d, generator=g) < 0.05),
    "positive": lambda d, g: torch.rand(d, generator=g) + 0.3,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [1, 7, 129, 1025])
def test_the_mean_over_keys_is_the_value(name: str, size: int) -> None:
    """Within 4 standard errors, all values together; and each as near as chance allows the worst of so many."""
    values = DISTRIBUTIONS[name](size, torch.Generator().manual_seed(7))
    codec, spec, keys = lean(step=0.8), spec_of({"w": values}), 200
    step = torch.tensor(0.8).double()
    total = torch.zeros(size, dtype=torch.float64)
    for number in range(keys):
        shared = Shared(Key.from_seed(number))
        blob, _ = codec.encode({"w": values}, shared, {})
        total += (codec.decode(blob, spec, shared)["w"] - values).double()
    part = (values.double() / step).remainder(1.0)
    variance = step.square() * part * (1 - part) / keys  # of each mean: of Bernoulli draws between two levels
    rounding = 1e-6 * float(values.abs().sum())
    assert abs(float(total.sum())) / keys <= 4 * math.sqrt(float(variance.sum())) + rounding
    assert float((total / keys).abs().max()) <= 4 * 0.8 / 2 / math.sqrt(keys) * 1.3 + rounding


@pytest.mark.parametrize("bits", [0.2, 1])
def test_no_bias_with_a_rate(bits: float) -> None:
    """The step follows from the draws, a little: that is far below what is seen."""
    values, keys = active(30, 40), 300
    codec, spec = lean(bits=bits), spec_of({"w": values})
    backs = []
    for number in range(keys):
        shared = Shared(Key.from_seed(number))
        backs.append(codec.decode(codec.encode({"w": values}, shared, {})[0], spec, shared)["w"].double())
    along = torch.tensor([float((back * values).sum() / values.double().square().sum()) for back in backs])
    assert abs(float(along.mean()) - 1) <= 4 * float(along.std()) / math.sqrt(keys)


# --- modes ------------------------------------------------------------------------------------------------------------


def test_nearest_where_what_is_lost_is_sent_later() -> None:
    codec = lean(bits=0.3)
    link = Link(codec, parse("by_leaf(b*: float32, *: lean:bits=0.3)"))
    assert link.up.traits.unbiased  # type: ignore[attr-defined]
    assert link.down.text == "by_leaf(b*: float32, *: lean:bits=0.3)"
    assert link.down.routes[1][1].mode == "nearest"  # type: ignore[attr-defined]
    assert ef(codec).codec.mode == "nearest"  # type: ignore[attr-defined]
    assert ef(codec).text == "ef(lean:bits=0.3)"
    assert with_memory(lean(bits=0.3, mode="unbiased")) == lean(bits=0.3, mode="unbiased")
    assert with_memory(eden(2)) == eden(2)


def test_nearest_loses_less() -> None:
    tree = {"w": active(200, 300)}
    for bits in (0.1, 0.5, 1):
        nearest, unbiased = (nmse(parse(f"lean:bits={bits},mode={m}"), tree)[1] for m in ("nearest", "unbiased"))
        assert nearest < 0.7 * unbiased


def test_rows_and_columns_are_are_worth_much() -> None:
    """The same values in another place: only contexts can tell."""
    values = active(300, 400)
    mixed = values.flatten()[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))]
    here, there = (nmse(lean(nmse=0.1, mode="nearest"), {"w": w})[0] for w in (values, mixed.view(300, 400)))
    assert here < 0.75 * there


def test_far_better_than_a_rotation() -> None:
    tree = {"w": active(300, 400), "v": 0.01 * active(300, 40, seed=1)}
    assert nmse(lean(bits=1), tree)[1] < 0.5 * nmse(eden(1), tree)[1]


# --- the coder of levels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((1,),), ((3, 5), (7,), (4, 3, 2, 2)), ((0, 4), (2000,), ()), ((40, 50),)])
@pytest.mark.parametrize("largest", [0, 1, 3, 40, LARGEST_LEVEL])
def test_levels_come_back(shapes: tuple[tuple[int, ...], ...], largest: int) -> None:
    layout = layout_of(shapes)
    random = np.random.default_rng(0)
    levels = (random.integers(-largest, largest + 1, layout.size) * (random.random(layout.size) < 0.7)).astype(np.int32)
    sink = Sink()
    write_levels(sink, levels, layout)
    source = Source(sink.getvalue())
    assert (read_levels(source, layout) == levels).all()
    source.finish()


def test_a_layout_is_a_permutation() -> None:
    layout: Layout = layout_of(((40, 50), (7,), (4, 3, 2, 2)))
    assert sorted(layout.order.tolist()) == list(range(layout.size))
    assert layout.phases[0].start == 0
    assert layout.phases[-1].stop == layout.size
    assert 2000 < layout.size < 3 * (layout.phases[-1].stop - layout.phases[-1].start) + 30


def test_hostile_payloads_cost_no_more_than_honest_ones() -> None:
    tree, codec = {"w": active(120, 250)}, lean(bits=0.5)
    spec, shared = spec_of(tree), Shared(KEY)
    blob = bytearray(codec.encode(tree, shared, {})[0])
    random = np.random.default_rng(0)

    def seconds(payload: bytes) -> float:
        began = time.process_time()
        with contextlib.suppress(PayloadError):
            codec.decode(payload, spec, shared)
        return time.process_time() - began

    honest = min(seconds(bytes(blob)) for _ in range(5))
    mutants = []
    for _ in range(300):
        mutant = bytearray(blob)
        for at in random.integers(4, len(blob), 3):
            mutant[at] = int(random.integers(256))
        mutants.append(seconds(bytes(mutant)))
    assert np.quantile(mutants, 0.99) <= 10 * honest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lean", "one of bits, nmse and step, got none"),
        ("lean:bits=1,step=1", "got bits=1.0, step=1.0"),
        ("lean:bits=0", "bits must be above 0"),
        ("lean:bits=-1", "bits must be above 0"),
        ("lean:nmse=1,mode=nearest", "below 1"),
        ("lean:step=0", "step must be between"),
        ("lean:bits=1,mode=exact", "mode"),
        ("topk:fraction=0.1 | lean:bits=1", "gives no Pipeline"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text)


def test_measured() -> None:
    row = measure(lean(bits=0.5, mode="nearest"), active(200, 300).flatten(), KEY, repeats=1)
    assert row.bits_per_value == pytest.approx(0.5, rel=0.02)
