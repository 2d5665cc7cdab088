"""What codecs say about themselves is true."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from laconic.codecs import Floats, Pipeline, RandomK, check_codec, float32, mask, parse
from laconic.core import Codec, ConfigError, Key, Shared, Spec, Traits, Tree, spec_of, traits_of

EXACT = ("float32", "mask", "mask:model=raw", "threshold:level=0", "topk:fraction=1", "randk:fraction=1", "ef(float32)")
UNBIASED = (
    *EXACT,
    "int8",
    "terngrad:clip=0",
    "qsgd:levels=4",
    "drive",
    "eden:bits=0.5",
    "eden:bits=1",
    "eden:bits=2.5",
    "randk:fraction=0.3",
    "randk:fraction=0.5 | int8",
    "randk:fraction=0.5 | eden:bits=2",
    "threshold:level=0 | qsgd:levels=4",
    "mask | eden:bits=2",
    "by_leaf(a: int8, *: eden:bits=1)",
    "by_leaf(a: qsgd:levels=4, *: float32)",
)
DENSE = (
    "float32",
    "float16",
    "bfloat16",
    "mask",
    "mask:model=raw",
    "mask | float16",
    "by_leaf(a: float32, *: bfloat16)",
    "ef(float32)",
)
KEEPS_WEIGHTS = (
    *DENSE,
    "int8",
    "eden:bits=0.5",
    "eden:bits=1",
    "eden:bits=2.5",
    "mask | eden:bits=2",
    "by_leaf(a: int8, *: eden:bits=1)",
    "by_leaf(a: int8, *: float16)",
)
BIASED = (
    "float16",
    "bfloat16",
    "mask | float16",
    "signsgd",
    "signsgd_mv",
    "terngrad",
    "drive_mse",
    "topk:fraction=0.3",
    "threshold:level=0.5",
    "lowrank:rank=1",
    "lowrank:rank=1 | int8",
    "topk:fraction=0.3 | int8",
    "randk:fraction=0.3 | signsgd",
    "mask | signsgd",
    "ef(drive)",
    "by_leaf(a: eden:bits=1, *: signsgd)",
    "by_leaf(a: float32, *: bfloat16)",
)
EVERY = tuple(dict.fromkeys(UNBIASED + BIASED + DENSE + KEEPS_WEIGHTS))


@pytest.mark.parametrize("text", EVERY)
def test_traits(text: str) -> None:
    assert traits_of(parse(text)) == Traits(
        exact=text in EXACT,
        unbiased=text in UNBIASED,
        dense=text in DENSE,
        keeps_weights=text in KEEPS_WEIGHTS,
        conditional=text.startswith("mask"),
        literal=text == "signsgd_mv",
    )


def example() -> Tree:
    random = torch.Generator().manual_seed(0)
    return {"a": torch.randn(16, 32, generator=random) + 0.2, "b": torch.randn(512, generator=random)}


@functools.cache
def mean_and_error(text: str, count: int = 400) -> tuple[Tensor, float]:
    """The mean of many decoded messages, and the mean squared error of one, relative to the squared norm."""
    codec, tree = parse(text), example()
    x = torch.cat([leaf.view(-1) for leaf in tree.values()]).double()
    total, error = torch.zeros_like(x), 0.0
    for seed in range(count):
        shared = Shared(Key.from_seed(seed))
        blob, _ = codec.encode(tree, shared, {})
        found = torch.cat([leaf.view(-1) for leaf in codec.decode(blob, spec_of(tree), shared).values()]).double()
        total += found / count
        error += float((found - x).square().sum() / x.square().sum()) / count
    return total - x, error


@pytest.mark.parametrize("text", UNBIASED)
def test_the_mean_of_many_messages_is_what_was_sent(text: str) -> None:
    """The error of a mean of n is an n-th of the error of one; half as much again is more than chance allows."""
    x = torch.cat([leaf.view(-1) for leaf in example().values()]).double()
    offset, error = mean_and_error(text)
    assert float(offset.square().sum() / x.square().sum()) <= 1.5 * error / 400 + 1e-12


@pytest.mark.parametrize("text", [text for text in BIASED if not text.startswith("ef(")])
def test_the_mean_of_many_messages_is_something_else(text: str) -> None:
    x = torch.cat([leaf.view(-1) for leaf in example().values()]).double()
    offset, error = mean_and_error(text)
    assert float(offset.square().sum() / x.square().sum()) > 2 * error / 400


@dataclass(frozen=True)
class Undeclared:
    """A codec of one's own that declares nothing."""

    text = "undeclared"
    id = 40_000

    def init_state(self, spec: Spec) -> Tree:
        return {}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        return float32().encode(tree, shared, state)

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        return float32().decode(blob, spec, shared)


def test_what_declares_nothing_is_made_for_changes() -> None:
    assert isinstance(Undeclared(), Codec)
    assert traits_of(Undeclared()) == Traits()
    assert traits_of(Pipeline((), Floats(), text="x", id=40_000)) == Traits()
    check_codec(Undeclared())


def test_a_chain_keeps_what_both_declare() -> None:
    half = Pipeline((RandomK(0.5),), Floats(), text="half", id=40_000, traits=Traits(unbiased=True))
    assert (half | parse("int8")).traits == Traits(unbiased=True)
    assert (mask() | half).traits == replace(half.traits, conditional=True)
    assert (half | mask()).traits == replace(half.traits, conditional=True)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="exact is unbiased"):
        Traits(exact=True)
    with pytest.raises(ConfigError, match="dense keeps weights"):
        Traits(dense=True)


def test_check_codec_finds_a_false_claim() -> None:
    wrong = Pipeline((), Floats("float16"), text="wrong", id=40_000, traits=Traits(exact=True, unbiased=True))
    with pytest.raises(AssertionError, match="must come back exactly"):
        check_codec(wrong)
