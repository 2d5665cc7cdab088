"""Leaves by their names to codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import laconic as lc
from laconic.codecs import CodecId, by_leaf, check_codec, eden, ef, float32, int8, mask, parse, signsgd, topk
from laconic.core import Codec, ConfigError, Key, Leaf, PayloadError, Shared, Spec, Tree, spec_of

SHARED = Shared(Key.from_seed(4))


def tree() -> Tree:
    random = torch.Generator().manual_seed(0)
    return {
        "c/one": torch.randn(30, generator=random),
        "mask/one": torch.rand(900, generator=random) < 0.03,
        "w/one": torch.randn(40, 20, generator=random),
        "c/two": torch.randn(5, 5, generator=random, dtype=torch.float64),
        "count": torch.arange(4),
        "w/two": torch.randn(70, generator=random),
    }


def there_and_back(codec: Codec, tree: Tree, shared: Shared = SHARED) -> Tree:
    blob, _ = codec.encode(tree, shared, codec.init_state(spec_of(tree)))
    return codec.decode(blob, spec_of(tree), shared)


def test_the_first_pattern_that_matches_counts() -> None:
    codec = by_leaf({"c/*": float32(), "*one": signsgd(), "*": int8()})
    decoded, sent = there_and_back(codec, tree()), tree()
    assert list(decoded) == list(sent)
    assert torch.equal(decoded["c/one"], sent["c/one"])
    assert torch.equal(decoded["c/two"], sent["c/two"].float().double())
    assert len(decoded["w/one"].unique()) == 2
    torch.testing.assert_close(decoded["w/two"], sent["w/two"], rtol=0, atol=float(sent["w/two"].abs().max()) / 127)
    assert torch.equal(decoded["mask/one"], sent["mask/one"])
    assert torch.equal(decoded["count"], sent["count"])


def test_python_and_text_make_the_same_codec() -> None:
    made = by_leaf({"c/*": int8(), "w?": topk(0.1, per_leaf=True) | eden(2), "*": ef_free()})
    text = "by_leaf(c/*: int8, w?: topk:fraction=0.1,per_leaf=true | eden:bits=2, *: mask | float16)"
    assert made.text == text
    assert parse(text) == made
    assert parse(" by_leaf( c/* : int8,w?:topk:fraction=0.1 , per_leaf=true|eden:bits=2,*: mask|float16 ) ") == made
    assert parse(f"ef({text})") == ef(made)
    assert made.id == CodecId.BY_LEAF
    check_codec(made)
    check_codec(ef(made))


def ef_free() -> Codec:
    return parse("mask | float16")


def test_what_a_route_costs_is_what_its_codec_costs_and_a_length() -> None:
    sent = tree()
    values = {name: leaf for name, leaf in sent.items() if name.startswith("w/")}
    bits = {"mask/one": sent["mask/one"]}
    parts = {**values, **bits}
    whole, _ = by_leaf({"mask*": mask(), "*": int8()}).encode(parts, SHARED, {})
    first, _ = mask().encode(bits, SHARED, {})
    second, _ = int8().encode(values, Shared(SHARED.key.fold_in(1)), {})
    assert whole == bytes([len(first)]) + first + _length(len(second)) + second
    assert len(first) < 900 / 8 / 2


def _length(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80, value >> 7])


def test_exact_leaves_pass_every_route() -> None:
    shared = Shared(SHARED.key, exact=frozenset({"w/one", "c/two"}))
    decoded = there_and_back(by_leaf({"c/*": signsgd(), "*": eden(1)}), tree(), shared)
    for name in shared.exact:
        assert torch.equal(decoded[name], tree()[name])


@pytest.mark.parametrize("text", ["by_leaf(kept: eden:bits=2, *: float32)", "by_leaf(f*: int8, m*: mask, *: drive)"])
def test_ragged_leaves_follow_from_leaves_of_other_routes(text: str) -> None:
    bits = torch.arange(500) % 3 == 0
    size = int(bits.sum())
    sent = {"kept": torch.randn(size), "free": torch.randn(4, 5), "mask": bits, "exact": torch.randn(size)}
    spec = {
        "kept": Leaf((500,), length=lambda exact: int(exact["mask"].sum())),
        "free": Leaf((4, 5)),
        "mask": Leaf((500,), torch.bool),
        "exact": Leaf((500,), length=lambda exact: int(exact["mask"].sum()), exact=True),
    }
    codec, shared = parse(text), Shared.of(spec, Key.from_seed(1))
    blob, _ = codec.encode(sent, shared, {})
    decoded = codec.decode(blob, spec, shared)
    assert list(decoded) == list(spec)
    assert decoded["kept"].shape == (size,)
    assert torch.equal(decoded["mask"], bits)
    assert torch.equal(decoded["exact"], sent["exact"])


def test_a_leaf_that_nothing_matches() -> None:
    codec = by_leaf({"c/*": int8(), "w/*": eden(2)})
    says = r"no pattern matches the leaf 'mask/one'.*by_leaf\(c/\*: int8, w/\*: eden:bits=2, \*: float32\)"
    for act in (codec.init_state, ef(codec).init_state):
        with pytest.raises(ConfigError, match=says):
            act(spec_of(tree()))
    with pytest.raises(ConfigError, match=says):
        codec.encode(tree(), SHARED, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("by_leaf()", "takes pattern: codec"),
        ("by_leaf(*)", "takes pattern: codec"),
        ("by_leaf(*: )", "takes pattern: codec"),
        ("by_leaf(a: int8,)", "takes pattern: codec"),
        ("by_leaf(a b: int8)", "without spaces"),
        ("by_leaf(a=b: int8)", "without spaces"),
        ("by_leaf(*: int8, a: int8)", "'a' is never reached"),
        ("by_leaf(a: int8, a: drive)", "'a' is never reached"),
        ("by_leaf(a: ef(int8), *: drive)", "write ef(by_leaf(a: int8, *: drive))"),
        ("by_leaf(*: edne:bits=2)", "did you mean 'eden'"),
        ("by_lef(*: int8)", "did you mean 'by_leaf'"),
        ("by_leaf(*: int8", "parentheses"),
        ("topk:fraction=0.1 | by_leaf(*: int8)", "write the chain inside it"),
        ("by_leaf(*: int8) | int8", "write the chain inside it"),
        ("ef(ef(by_leaf(*: int8)))", "one error feedback"),
    ],
)
def test_mistakes_get_one_clear_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_in_python() -> None:
    with pytest.raises(ConfigError, match="at least one pattern"):
        by_leaf({})
    with pytest.raises(ConfigError, match="go around a chain"):
        mask() | by_leaf({"*": int8()})  # type: ignore[operator]


class Counting:
    """A codec of one's own with a state: how many messages it has sent."""

    text = "counting"
    id = CodecId.CUSTOM

    def init_state(self, spec: Spec) -> Tree:
        return {"sent": torch.tensor(0)}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        return float32().encode(tree, shared, {})[0], {"sent": state["sent"] + 1}

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        return float32().decode(blob, spec, shared)


def test_codecs_keep_their_states() -> None:
    codec = by_leaf({"c/*": Counting(), "w/*": Counting(), "*": float32()})
    state = codec.init_state(spec_of(values()))
    assert set(state) == {"0/sent", "1/sent"}
    for _ in range(3):
        _, state = codec.encode(values(), SHARED, state)
    assert {name: int(leaf) for name, leaf in state.items()} == {"0/sent": 3, "1/sent": 3}


def values() -> Tree:
    return {name: leaf for name, leaf in tree().items() if leaf.is_floating_point()}


def test_lengths_that_lie_are_refused() -> None:
    codec, spec = by_leaf({"c/*": float32(), "*": float32()}), spec_of(values())
    blob, _ = codec.encode(values(), SHARED, {})
    for wrong in (bytes([0]) + blob[1:], b"\xff\xff\xff\x7f" + blob, bytes([blob[0] ^ 1]) + blob[1:], b""):
        with pytest.raises(PayloadError):
            codec.decode(wrong, spec, SHARED)


DIGITS: dict[str, Any] = {"rounds": 2, "cohort": 2, "workers": 0, "evaluations": ("global",)}


def test_up_and_down_in_a_run() -> None:
    data = lc.data.digits(clients=4)
    text = "by_leaf(*bias: float32, *: eden:bits=2)"
    for up, down in ((text, text), (f"ef({text})", "by_leaf(*bias: float32, *: float16)")):
        summary = lc.fit(data=data, up=up, down=down, **DIGITS).summary
        assert (summary["up"], summary["down"]) == (up, down)
        assert summary["rejected"] == 0
    lc.fit(method="fedsparse", data=data, up=text, down="by_leaf(*bias: float32, *: int8)", **DIGITS)
    lc.fit(method="fedpm", data=data, up="by_leaf(*: mask)", down="by_leaf(*: mask)", **DIGITS)
    lc.fit(method="lg_fedavg", data=data, up=text, down=text, **DIGITS)
    lc.fit(method="fedsparse", data=data, down="by_leaf(*bias: float32, *: drive)", **DIGITS)
    with pytest.raises(ConfigError, match="no pattern matches"):
        lc.fit(data=data, up="by_leaf(*bias: float32)", **DIGITS)
    with pytest.raises(ConfigError, match="no pattern matches"):
        lc.fit(data=data, down="by_leaf(*bias: float32)", **DIGITS)
