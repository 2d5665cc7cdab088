from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import (
    Leaf,
    PayloadError,
    Tree,
    describe,
    leaf_bytes,
    map_tree,
    num_values,
    prefixed,
    resolve,
    spec_of,
    subtree,
    tree_sha256,
)


def example() -> Tree:
    return {
        "b": torch.tensor([1.0, -2.0]),
        "a": torch.tensor([[True, False]]),
        "c": torch.tensor(3, dtype=torch.int64),
        "h": torch.tensor([0.5], dtype=torch.bfloat16),
        "e": torch.zeros(0, 3),
    }


# --- specifications --------------------------------------------------------------------------------------------------


def test_spec_keeps_order_shapes_and_types() -> None:
    spec = spec_of(example())
    assert list(spec) == ["b", "a", "c", "h", "e"]
    assert spec["a"] == Leaf((1, 2), torch.bool)
    assert spec["c"] == Leaf((), torch.int64)
    assert num_values(spec) == 2 + 2 + 1 + 1 + 0


@pytest.mark.parametrize(
    ("leaf", "size", "num_bytes"),
    [
        (Leaf((2, 3)), 6, 24),
        (Leaf(()), 1, 4),
        (Leaf((0, 7)), 0, 0),
        (Leaf((5,), torch.bool), 5, 5),
        (Leaf((5,), torch.float64), 5, 40),
        (Leaf((5,), torch.bfloat16), 5, 10),
    ],
)
def test_sizes(leaf: Leaf, size: int, num_bytes: int) -> None:
    assert (leaf.size, leaf.num_bytes) == (size, num_bytes)


def test_describe_is_canonical() -> None:
    assert describe(spec_of(example())) == "b:float32[2];a:bool[1,2];c:int64[];h:bfloat16[1];e:float32[0,3]"
    ragged = {"kept": Leaf((7,), torch.float16, length=lambda tree: 3)}
    assert describe(ragged) == "kept:float16[<=7]"


# --- ragged leaves ---------------------------------------------------------------------------------------------------


def kept(tree: Tree) -> int:
    return int(tree["mask"].sum())


RAGGED = {"mask": Leaf((5,), torch.bool), "kept": Leaf((5,), torch.float64, length=kept), "plain": Leaf((2, 2))}


@settings(deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=5, max_size=5))
def test_resolve_fills_lengths_in(mask: list[bool]) -> None:
    resolved = resolve(RAGGED, {"mask": torch.tensor(mask)})
    assert resolved == {
        "mask": Leaf((5,), torch.bool),
        "kept": Leaf((sum(mask),), torch.float64),
        "plain": Leaf((2, 2)),
    }
    assert list(resolved) == list(RAGGED)
    assert resolve(resolved, {}) == resolved  # what is resolved needs no message any more


@pytest.mark.parametrize("length", [-1, 6, 2**40])
def test_resolve_refuses_a_length_that_cannot_be(length: int) -> None:
    spec = {"kept": Leaf((5,), length=lambda tree: length)}
    with pytest.raises(PayloadError, match=f"'kept' would have {length} values, but 5 is the most") as caught:
        resolve(spec, {})
    assert caught.value.reason == "length"


# --- functions of trees ----------------------------------------------------------------------------------------------


def test_map_tree_goes_by_name_not_by_place() -> None:
    one = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    other = {"b": torch.tensor(20.0), "a": torch.tensor(10.0), "more": torch.tensor(0.0)}
    summed = map_tree(torch.add, one, other)
    assert list(summed) == ["a", "b"]
    assert (summed["a"], summed["b"]) == (11.0, 22.0)
    assert (one["a"], other["a"]) == (1.0, 10.0)


def test_map_tree_wants_every_leaf() -> None:
    with pytest.raises(KeyError):
        map_tree(torch.add, {"a": torch.ones(1)}, {})


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=3), st.lists(st.text(max_size=5), unique=True, max_size=4))
def test_subtree_takes_out_what_prefixed_put_in(prefix: str, names: list[str]) -> None:
    tree = {name: torch.tensor(i) for i, name in enumerate(names)}
    joined = {**prefixed(prefix, tree), f"{prefix}x": torch.tensor(-1)}
    out = subtree(prefix, joined)
    assert {name: int(leaf) for name, leaf in out.items()} == {name: int(leaf) for name, leaf in tree.items()}
    assert list(out) == names


def test_subtree_does_not_take_names_that_only_begin_alike() -> None:
    tree = {"w/a": torch.ones(1), "w2/a": torch.ones(1), "w": torch.ones(1), "ww/w/a": torch.ones(1)}
    assert list(subtree("w", tree)) == ["a"]


# --- bytes and hashes ------------------------------------------------------------------------------------------------


def test_leaf_bytes_are_row_major_and_little_endian() -> None:
    assert leaf_bytes(torch.tensor([1, 256], dtype=torch.int32)) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert leaf_bytes(torch.tensor(1.5, dtype=torch.float64)) == np.array(1.5, "<f8").tobytes()
    assert leaf_bytes(torch.tensor([1.5], dtype=torch.bfloat16)) == bytes([0xC0, 0x3F])
    turned = torch.arange(6.0).reshape(2, 3).T
    assert leaf_bytes(turned) == np.array([0, 3, 1, 4, 2, 5], "<f4").tobytes()
    assert leaf_bytes(torch.ones(2, requires_grad=True)) == np.ones(2, "<f4").tobytes()
    assert leaf_bytes(torch.zeros(0, 3)) == b""


def test_sha256_is_the_written_formula_and_stays_it() -> None:
    digest = hashlib.sha256()
    digest.update(b"a:bool[1,2]\0" + bytes([1, 0]))
    digest.update(b"b:float32[2]\0" + np.array([1, -2], "<f4").tobytes())
    digest.update(b"c:int64[]\0" + np.array(3, "<i8").tobytes())
    digest.update(b"e:float32[0,3]\0")
    digest.update(b"h:bfloat16[1]\0" + bytes([0x00, 0x3F]))
    assert tree_sha256(example()) == digest.hexdigest()
    assert tree_sha256(example()) == "adb1178d3557e68da88f93e5f4803364989192deae3eed22a91d6f69e58b6f27"
    assert tree_sha256({}) == hashlib.sha256().hexdigest()


def test_sha256_does_not_depend_on_order_or_layout_in_memory() -> None:
    tree = example()
    assert tree_sha256(dict(reversed(tree.items()))) == tree_sha256(tree)
    wide = torch.arange(12.0).reshape(3, 4)
    assert tree_sha256({"x": wide[:, ::2]}) == tree_sha256({"x": wide[:, ::2].contiguous()})


@pytest.mark.parametrize(
    "change",
    [
        {"b": torch.tensor([1.0, -2.0000002])},
        {"b": torch.tensor([-2.0, 1.0])},
        {"b": torch.tensor([[1.0, -2.0]])},
        {"b": torch.tensor([1.0, -2.0], dtype=torch.float64)},
        {"b2": torch.tensor([1.0])},
        {"e": torch.zeros(3, 0)},
        {"h": torch.tensor([0.5], dtype=torch.float16)},
    ],
    ids=["a bit", "order", "shape", "type", "a leaf", "empty shape", "half type"],
)
def test_sha256_notices(change: Tree) -> None:
    assert tree_sha256({**example(), **change}) != tree_sha256(example())


def test_sha256_tells_zero_from_minus_zero() -> None:
    assert tree_sha256({"x": torch.tensor(0.0)}) != tree_sha256({"x": torch.tensor(-0.0)})
