from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import tree_sha256
from laconic.engine import ClientStore, pack, unpack

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.integers(0, 9)),
        max_size=5,
    )
)
def test_what_is_packed_is_unpacked(shapes: dict[str, tuple[list[int], torch.dtype, int]]) -> None:
    tree = {name: torch.full(shape, value).to(dtype) for name, (shape, dtype, value) in shapes.items()}
    unpacked = unpack(pack(tree))
    assert tree_sha256(unpacked) == tree_sha256(tree)


def test_nothing_costs_nothing() -> None:
    assert pack({}) == b""
    assert unpack(b"") == {}


def test_leaves_may_share_memory_and_have_any_strides() -> None:
    """A state may hold a tree under two names, parts of one vector, and transposed views."""
    vector = torch.arange(12.0)
    tree = {"a": vector[:6], "b": vector[6:], "whole": vector, "again": vector, "t": vector.view(3, 4).T}
    before = tree_sha256(tree)
    assert tree_sha256(unpack(pack(tree))) == before
    assert tree_sha256(tree) == before


def test_a_store_keeps_only_clients_that_have_something() -> None:
    store = ClientStore()
    store[7], store[2], store[5] = b"x", b"y", b""
    assert list(store) == [2, 7]
    store[7] = b""
    assert dict(store) == {2: b"y"}
    del store[2]
    assert len(store) == 0
    assert store.get(2, b"") == b""
