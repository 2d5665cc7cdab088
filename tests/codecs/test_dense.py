from __future__ import annotations

import pytest
import torch

from laconic.codecs import parse
from laconic.core import Key, Leaf, PayloadError, Shared, spec_of

SHARED = Shared(Key.from_seed(0))
TREE = {
    "w": torch.linspace(-2, 2, 15).reshape(5, 3),
    "mask": torch.tensor([True, False, True] * 3),
    "b": torch.tensor([0.1, -7.25], dtype=torch.float64),
    "count": torch.tensor([[1, -2]], dtype=torch.int32),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "width", "tolerance"), [("float32", 4, 1e-7), ("float16", 2, 1e-3), ("bfloat16", 2, 8e-3)]
)
def test_round_trip(name: str, width: int, tolerance: float) -> None:
    codec = parse(name)
    blob, state = codec.encode(TREE, SHARED, {})
    assert state == {}
    assert len(blob) == width * 18 + 2 + 8
    decoded = codec.decode(blob, spec_of(TREE), SHARED)
    assert list(decoded) == list(TREE)
    assert spec_of(decoded) == spec_of(TREE)
    for leaf, given in zip(decoded.values(), TREE.values(), strict=True):
        torch.testing.assert_close(leaf, given, rtol=tolerance, atol=1e-6)


def test_bits_and_integers_are_exact() -> None:
    codec = parse("bfloat16")
    decoded = codec.decode(codec.encode(TREE, SHARED, {})[0], spec_of(TREE), SHARED)
    assert torch.equal(decoded["mask"], TREE["mask"])
    assert torch.equal(decoded["count"], TREE["count"])


@pytest.mark.parametrize(
    ("name", "largest"), [("float32", 3.4028235e38), ("float16", 65504.0), ("bfloat16", 3.3895314e38)]
)
def test_values_beyond_the_type_saturate(name: str, largest: float) -> None:
    tree = {"w": torch.tensor([1.0, 1e300, -1e300], dtype=torch.float64)}
    codec = parse(name)
    decoded = codec.decode(codec.encode(tree, SHARED, {})[0], spec_of(tree), SHARED)
    assert decoded["w"].tolist() == pytest.approx([1.0, largest, -largest])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_non_finite_values_are_refused_at_both_ends(name: str, bad: float) -> None:
    codec = parse(name)
    tree = {"a": torch.zeros(3), "b": torch.tensor([0.0, bad])}
    with pytest.raises(PayloadError, match="'b'") as caught:
        codec.encode(tree, SHARED, {})
    assert caught.value.reason == "non_finite"
    dtype = getattr(torch, name)
    blob = torch.cat(list(tree.values())).to(dtype).view(torch.uint8).numpy().tobytes()
    with pytest.raises(PayloadError, match="'b'") as caught:
        codec.decode(blob, spec_of(tree), SHARED)
    assert caught.value.reason == "non_finite"


def test_the_length_comes_from_the_spec() -> None:
    codec = parse("float32")
    blob, _ = codec.encode(TREE, SHARED, {})
    for wrong, reason in ((blob[:-1], "truncated"), (blob + b"\0", "trailing"), (b"", "truncated")):
        with pytest.raises(PayloadError) as caught:
            codec.decode(wrong, spec_of(TREE), SHARED)
        assert caught.value.reason == reason


def test_spare_bits_must_be_zero() -> None:
    spec = {"mask": Leaf((3,), torch.bool)}
    assert parse("float32").decode(b"\x05", spec, SHARED)["mask"].tolist() == [True, False, True]
    with pytest.raises(PayloadError, match="padding"):
        parse("float32").decode(b"\x0d", spec, SHARED)


def test_inputs_stay_and_need_not_be_contiguous() -> None:
    tree = {"w": torch.randn(4, 6).t(), "g": torch.ones(2, requires_grad=True)}
    before = {name: leaf.clone() for name, leaf in tree.items()}
    codec = parse("float16")
    codec.decode(codec.encode(tree, SHARED, {})[0], spec_of(tree), SHARED)
    assert all(torch.equal(tree[name], before[name]) for name in tree)


def test_the_empty_tree_is_no_bytes() -> None:
    codec = parse("float32")
    assert codec.encode({}, SHARED, {})[0] == b""
    assert codec.decode(b"", {}, SHARED) == {}
