"""Minimal random coding: what is received is nearly a draw, for the bits that it should cost, whoever computes it."""

from __future__ import annotations

import hashlib
import math
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic.codecs import candidates, check_codec, mask, mrc, parse
from laconic.codecs.check import fuzz, mutated
from laconic.core import ConfigError, Key, Leaf, PayloadError, Shared, Tree, drawn

KEY = Key.from_seed(5)


def shared(expected: Tensor | None = None, key: Key = KEY) -> Shared:
    return Shared(key, expected={} if expected is None else {"m": expected}, bernoulli=frozenset({"m"}))


def sent(theta: Tensor, expected: Tensor | None, text: str = "mrc", key: Key = KEY) -> tuple[bytes, Tensor]:
    """The payload, and the bits that come of it."""
    codec, known = parse(text), shared(expected, key)
    blob, _ = codec.encode({"m": theta}, known, {})
    bits = codec.decode(blob, {"m": Leaf(tuple(theta.shape), torch.bool)}, known)["m"]
    assert (bits.shape, bits.dtype) == (theta.shape, torch.bool)
    return blob, bits


def some(size: int, change: float = 0.6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A server's θ from the counts of ten masks, and a client's after a round."""
    random = torch.Generator().manual_seed(seed)
    true = torch.from_numpy(np.random.default_rng(seed).beta(0.4, 0.4, size)).float()
    expected = 0.01 + 0.098 * torch.binomial(torch.full((size,), 10.0), true, generator=random)
    return expected, torch.sigmoid(torch.logit(expected) + change * torch.randn(size, generator=random))


def divergence(theta: Tensor, expected: Tensor) -> float:
    q, p = theta.double(), expected.double()
    return float((q * (q / p).log2() + (1 - q) * ((1 - q) / (1 - p)).log2()).sum())


def slope(bits: Tensor, theta: Tensor, expected: Tensor) -> float:
    """1 where the bits are draws from θ, 0 where they are draws from what was expected."""
    change = theta - expected
    return float(((bits.float() - expected) * change).sum() / (change * change).sum())


# --- rate and bias ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "kl"), [(8, 3.0), (8, 5.0), (8, 12.0), (6, 2.0), (10, 6.0)])
def test_the_rate_is_that_of_the_blocks(bits: int, kl: float) -> None:
    """KL·bits/kl within 2 %, and a byte or two for each context."""
    expected, theta = some(400_000)
    blob, _ = sent(theta, expected, f"mrc:bits={bits},kl={kl:g}")
    assert 8 * len(blob) == pytest.approx(divergence(theta, expected) * bits / kl, rel=0.02, abs=8 * 40)


@pytest.mark.parametrize("change", [0.3, 0.6, 1.2])
def test_smaller_blocks_lead_closer_to_the_sender(change: float) -> None:
    expected, theta = some(400_000, change)
    slopes = [slope(sent(theta, expected, f"mrc:kl={kl}")[1], theta, expected) for kl in (2, 5, 12)]
    assert slopes[0] > 0.93
    assert slopes[1] > 0.75
    assert 0.4 < slopes[2] < slopes[1] < slopes[0] < 1.1


def test_what_is_received_is_nearly_a_draw() -> None:
    """The mean over many keys goes from what is expected towards θ, for each bit by about the same share."""
    expected, theta = torch.full((600,), 0.3), torch.full((600,), 0.3)
    theta[:200], theta[200:400] = 0.6, 0.1
    mean = torch.stack([sent(theta, expected, "mrc:kl=2", KEY.fold_in(i))[1].float() for i in range(400)]).mean(dim=0)
    for part, wanted in ((slice(0, 200), 0.6), (slice(200, 400), 0.1), (slice(400, 600), 0.3)):
        assert float(mean[part].mean()) == pytest.approx(wanted, abs=0.03)


def test_what_is_expected_costs_a_byte_for_each_context() -> None:
    """And comes as draws from it, others for another key."""
    expected, _ = some(200_000)
    blob, bits = sent(expected, expected)
    assert len(blob) <= 40
    _, again = sent(expected, expected, key=KEY.fold_in(1))
    assert not torch.equal(bits, again)
    for level in expected.unique():
        there = expected == level
        assert float(bits[there].double().mean()) == pytest.approx(
            float(level), abs=4 * math.sqrt(0.25 / int(there.sum()))
        )


def test_far_fewer_bits_than_a_drawn_mask() -> None:
    expected, theta = some(120_000)
    blob, bits = sent(theta, expected)
    known = Shared(KEY, expected={"m": expected})
    plain, _ = mask().encode(drawn({"m": theta}, ["m"], KEY), known, {})
    assert len(blob) < 0.1 * len(plain)
    assert slope(bits, theta, expected) > 0.8


def test_certainty_comes_through() -> None:
    """Where nothing is expected and each block carries a tenth of what its index could."""
    theta = (torch.rand(4000, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    _, bits = sent(theta, None, "mrc:bits=10,kl=1")
    assert torch.equal(bits, theta.bool())


@pytest.mark.parametrize("size", [0, 1, 7, 5000])
@pytest.mark.parametrize("levels", [1, 3, 5000])
def test_any_size_and_any_expectation(size: int, levels: int) -> None:
    random = torch.Generator().manual_seed(size)
    expected = torch.randint(0, levels + 1, (size,), generator=random) / levels
    sent(torch.rand(size, generator=random), expected)
    sent(torch.rand(size, generator=random).reshape(-1, 1), None)


# --- the sender's choice ------------------------------------------------------------------------------------------


def test_the_choice_is_made_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of log-weights are exact: in double precision the same candidates win."""
    expected, theta = some(3000, 1.0)
    blob, _ = sent(theta, expected)
    for table in (candidates._logits, candidates._gumbel):
        assert np.array_equal(table(), np.rint(table()))
        assert float(np.abs(table()).max()) * 4096 < 2**24
        wide = table().astype(np.float64)
        monkeypatch.setattr(candidates, table.__name__, lambda wide=wide: wide)
    assert sent(theta, expected)[0] == blob


def test_another_key_another_choice() -> None:
    expected, theta = some(3000, 1.0)
    assert sent(theta, expected)[0] != sent(theta, expected, key=KEY.fold_in(1))[0]


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(wrong: float) -> None:
    for encode in (
        lambda theta: mrc().encode({"m": theta}, shared(), {}),
        lambda theta: drawn({"m": theta}, ["m"], KEY),
    ):
        with pytest.raises(PayloadError, match=r"'m' holds probabilities outside \[0, 1\]"):
            encode(torch.tensor([0.5, wrong]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mrc:bits=0", "bits must be between 1 and 12, got 0"),
        ("mrc:bits=13", "bits must be between 1 and 12, got 13"),
        ("mrc:kl=0", "kl must be between 0.1 and 100 bits"),
        ("mrc:kl=101", "kl must be between 0.1 and 100 bits"),
        ("ef(mrc)", "leave nothing to feed back"),
        ("mrc | mask", "bits are coded once"),
    ],
)
def test_settings_out_of_range(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


# --- with others --------------------------------------------------------------------------------------------------


def test_the_laws() -> None:
    check_codec(mrc())
    check_codec(parse("mrc:bits=4,kl=2 | eden:bits=2"))


def test_beside_values_counts_and_bits_of_no_probability() -> None:
    expected, theta = some(2000)
    tree = {"w": torch.randn(50), "m": theta, "sure": theta > 0.5, "n": torch.arange(40)}
    bits = Leaf((2000,), torch.bool)
    spec = {"w": Leaf((50,)), "m": bits, "sure": bits, "n": Leaf((40,), torch.int64)}
    for text in ("mrc", "mrc | eden:bits=4", "by_leaf(m: mrc, *: float32)", "by_leaf(w: mrc, *: mask)"):
        blob, _ = parse(text).encode(tree, shared(expected), {})
        decoded = parse(text).decode(blob, spec, shared(expected))
        assert list(decoded) == list(spec)
        assert torch.equal(decoded["sure"], tree["sure"])
        assert torch.equal(decoded["n"], tree["n"])
        assert decoded["m"].dtype == torch.bool


# --- hostile payloads ---------------------------------------------------------------------------------------------


def test_mutants_and_prefixes() -> None:
    expected, theta = some(900, 1.5)
    spec: dict[str, Leaf] = {"m": Leaf((900,), torch.bool)}
    blob, _ = sent(theta, expected)
    for length in range(len(blob)):
        with pytest.raises(PayloadError):
            mrc().decode(blob[:length], spec, shared(expected))
    with pytest.raises(PayloadError):
        mrc().decode(blob + b"\0", spec, shared(expected))
    for mutant in mutated(blob, 3000, np.random.default_rng(0)):
        try:
            decoded = mrc().decode(mutant, spec, shared(expected))
        except PayloadError:
            continue
        assert decoded["m"].shape == (900,)
    tree: Tree = {"m": theta < 0.3}
    assert fuzz(mrc(), tree, mutants=2000).refused > 200


@pytest.mark.parametrize(
    ("blob", "size", "reason"),
    [
        (b"", 20, "truncated"),
        (b"\x15", 20, "count"),  # more blocks than bits
        (b"\x01", 20, "truncated"),
        (b"\x01\x05\x00", 20, "trailing"),
        (b"\x01\x05", 4097, "count"),  # a block of more bits than there are in one
        (b"\x00\x00", 20, "trailing"),
        (b"\x02\x05\x05\x10", 20, "trailing"),
    ],
)
def test_hand_made_indices(blob: bytes, size: int, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        mrc().decode(blob, {"m": Leaf((size,), torch.bool)}, shared())
    assert caught.value.reason == reason


def test_spare_bits_are_zero() -> None:
    codec = parse("mrc:bits=5")
    assert codec.decode(b"\x01\x1f", {"m": Leaf((20,), torch.bool)}, shared())["m"].shape == (20,)
    with pytest.raises(PayloadError, match="padding"):
        codec.decode(b"\x01\x3f", {"m": Leaf((20,), torch.bool)}, shared())


# --- speed, and bytes ---------------------------------------------------------------------------------------------


def test_a_mask_of_conv6_takes_a_second_to_encode_and_half_to_decode() -> None:
    """2,262,602 bits on one thread, in the processor's own time."""
    expected, theta = some(2_262_602)
    codec, known, threads = mrc(), shared(expected), torch.get_num_threads()
    torch.set_num_threads(1)
    encode = decode = math.inf
    for _ in range(3):
        began = time.process_time()
        blob, _ = codec.encode({"m": theta}, known, {})
        between = time.process_time()
        codec.decode(blob, {"m": Leaf((2_262_602,), torch.bool)}, known)
        encode, decode = min(encode, between - began), min(decode, time.process_time() - between)
    torch.set_num_threads(threads)
    assert encode <= 1
    assert decode <= 0.5


def golden(text: str) -> tuple[int, str, str]:
    k = np.arange(6000)
    expected = torch.from_numpy((1 + k % 7) / 8)
    theta = torch.from_numpy((1 + k * 7919 % 211 % 15) / 16)
    blob, bits = sent(theta, expected, text, Key.from_seed(2026))
    packed = np.packbits(bits.numpy(), bitorder="little").tobytes()
    return len(blob), hashlib.sha256(blob).hexdigest()[:16], hashlib.sha256(packed).hexdigest()[:16]


@pytest.mark.parametrize("text", ["mrc", "mrc:bits=3,kl=1", "mrc:bits=11,kl=40"])
def test_golden_bytes(text: str) -> None:
    assert golden(text) == GOLDEN[text]


GOLDEN: dict[str, tuple[int, str, str]] = {
    "mrc": (581, "08264b1e5a89cab3", "fef7c78790783d1b"),
    "mrc:bits=3,kl=1": (1090, "fd2bb92285a30e46", "9baa76b5d9df0fa7"),
    "mrc:bits=11,kl=40": (105, "7f948bec6e625d46", "048c100419e46c63"),
}
