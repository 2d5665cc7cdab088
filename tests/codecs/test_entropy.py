from __future__ import annotations

import math

import constriction
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import Sink, Source, parse, read_indices, read_symbols, write_indices, write_symbols
from laconic.codecs.check import mutated
from laconic.codecs.entropy import Code, IndexCode, log2_choose
from laconic.core import Key, PayloadError, Shared


def written(symbols: torch.Tensor, alphabet: int, probabilities: torch.Tensor | None = None) -> bytes:
    sink = Sink()
    write_symbols(sink, symbols, alphabet, given=probabilities)
    return sink.getvalue()


def bits(size: int, probability: float | torch.Tensor, seed: int = 0) -> torch.Tensor:
    return (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < probability).to(torch.uint8)


def binary_entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


@settings(deadline=None)
@given(st.integers(2, 700), st.integers(0, 5), st.integers(1, 3000), st.integers(0, 99))
def test_symbols_round_trip(alphabet: int, skew: int, size: int, seed: int) -> None:
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    symbols = (uniform ** (1 + 3 * skew) * alphabet).to(torch.uint8 if alphabet <= 256 else torch.int32)
    blob = written(symbols, alphabet)
    source = Source(blob)
    assert torch.equal(read_symbols(source, size, alphabet), symbols)
    source.finish()
    assert len(blob) <= 1 + math.ceil(math.log2(alphabet)) * math.ceil(size / 8)


@pytest.mark.parametrize("probability", [0.5, 0.3, 0.05, 0.001, 0.0])
def test_bits_at_their_entropy(probability: float) -> None:
    symbols = bits(200_000, probability)
    share = float(symbols.float().mean())
    bound = 200_000 * binary_entropy(share) / 8 if share else 0
    assert len(written(symbols, 2)) <= bound * 1.001 + 8


def test_the_adaptive_code_follows_a_drifting_frequency() -> None:
    drift = torch.linspace(0.01, 0.99, 200_000)
    symbols = bits(200_000, drift)
    blob = written(symbols, 2)
    assert blob[0] == Code.ADAPTIVE
    assert len(blob) * 8 < 1.02 * sum(binary_entropy(float(p)) for p in drift[::100]) * 100
    assert torch.equal(read_symbols(Source(blob), 200_000, 2), symbols)


def test_given_probabilities_cost_the_cross_entropy_and_never_more_than_one_frequency() -> None:
    theta = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) ** 3
    symbols = bits(200_000, theta)
    blob = written(symbols, 2, theta)
    bound = float(-torch.where(symbols.bool(), theta, 1 - theta).clamp(2**-16).log2().sum()) / 8
    assert blob[0] == Code.GIVEN
    assert len(blob) <= bound * 1.005 + 64
    assert torch.equal(read_symbols(Source(blob), 200_000, 2, given=theta), symbols)
    wrong = written(symbols, 2, 1 - theta)
    assert len(wrong) == len(written(symbols, 2))
    assert torch.equal(read_symbols(Source(wrong), 200_000, 2, given=1 - theta), symbols)


def test_certain_probabilities_are_never_quite_certain() -> None:
    theta = torch.tensor([0.0, 1.0] * 5000)
    for symbols in (theta.to(torch.uint8), bits(10_000, 0.5)):
        blob = written(symbols, 2, theta)
        assert torch.equal(read_symbols(Source(blob), 10_000, 2, given=theta), symbols)


@settings(deadline=None)
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99))
def test_indices_round_trip(size: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    index = np.sort(random.choice(size, round(share * size), replace=False))
    assert np.array_equal(_indices_again(index, size), index)


@pytest.mark.parametrize("index", [[0], [999_999], [0, 999_999], list(range(500)), list(range(999_500, 1_000_000))])
def test_indices_in_odd_places(index: list[int]) -> None:
    assert _indices_again(np.array(index), 1_000_000).tolist() == index


@pytest.mark.parametrize("size", [100_000, 2_262_602])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.5])
def test_indices_within_2_percent_of_the_bound(size: int, fraction: float) -> None:
    count = round(fraction * size)
    index = np.sort(np.random.default_rng(0).choice(size, count, replace=False))
    sink = Sink()
    write_indices(sink, index, size)
    assert 8 * len(sink.getvalue()) <= 1.02 * log2_choose(size, count) + 8 * 8  # the header of a short code
    assert sink.ideal_bits == log2_choose(size, count)


def test_clustered_indices_cost_less_than_random_ones() -> None:
    random = np.random.default_rng(0)
    index = np.unique(np.concatenate([random.integers(a, a + 2000, 800) for a in (10_000, 400_000, 900_000)]))
    sink = Sink()
    write_indices(sink, index, 1_000_000)
    assert sink.getvalue()[0] == IndexCode.TABLE
    assert 8 * len(sink.getvalue()) < 0.65 * log2_choose(1_000_000, len(index))


@pytest.mark.parametrize(
    ("text", "largest"),
    [
        ("signsgd", 1.0005),
        ("drive", 1.01),
        ("eden:bits=1", 1.01),
        ("eden:bits=2", 1.93),
        ("eden:bits=4", 3.8),
        ("eden:bits=8", 7.8),
        ("eden:bits=0.1", 0.11),
        ("terngrad", 1.23),
        ("qsgd:levels=16", 0.3),
        ("qsgd:levels=512", 2.9),
        ("int8", 7.0),
        ("topk:fraction=0.01", 0.41),
    ],
)
@pytest.mark.parametrize("size", [100_000, 131_071, 2_262_602])
def test_rates(text: str, largest: float, size: int) -> None:
    tree = {"x": torch.randn(size, generator=torch.Generator().manual_seed(0))}
    codec, shared = parse(text), Shared(Key.from_seed(0))
    blob, _ = codec.encode(tree, shared, {})
    assert 8 * len(blob) <= 1.005 * codec.entropy_bits(tree, shared) + 8 * 64
    assert 8 * len(blob) <= largest * size


def test_panics_of_the_library_do_not_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Broken:
        def __init__(self, words: object) -> None:
            raise PanicException("index out of bounds")

    symbols = bits(5000, 0.1)
    blob = written(symbols, 2)
    monkeypatch.setattr(constriction.stream.stack, "AnsCoder", Broken)
    assert blob[0] == Code.STATIC
    with pytest.raises(PayloadError, match="no valid code"):
        read_symbols(Source(blob), 5000, 2)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "truncated"),
        (b"\x09", "coder"),
        (b"\x04\x00", "coder"),
        (b"\x00\x01", "truncated"),
        (b"\x00\x01\xff", "padding"),
        (b"\x01\x02", "count"),
        (b"\x01\x81\x00", "count"),
        (b"\x02\x01\x00\x00", "table"),
        (b"\x02\x01\x01\xff\xff\xff\x7f", "count"),
        (b"\x02\x01\x01\x01\x00\x00\x00\x00", "symbols"),
        (b"\x02\x01\x01\x02\xff\xff\xff\xff\xff\xff\xff\xff", "symbols"),
        (b"\x03\x04" + bytes([255]) * 16, "symbols"),
    ],
)
def test_malformed_symbols(blob: bytes, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        read_symbols(Source(blob), 12, 2)
    assert caught.value.reason == reason


@pytest.mark.parametrize("code", list(Code))
def test_mutants_of_every_code(code: Code) -> None:
    theta = torch.rand(3000, generator=torch.Generator().manual_seed(1)) ** 4
    drift = torch.linspace(0.001, 0.999, 20_000)
    symbols = {
        Code.PACKED: bits(3000, 0.5),
        Code.CONSTANT: bits(3000, 0.0),
        Code.STATIC: bits(3000, 0.1),
        Code.ADAPTIVE: bits(20_000, drift),
        Code.GIVEN: bits(3000, theta),
    }[code]
    known = theta if code == Code.GIVEN else None
    blob = written(symbols, 2, known)
    assert blob[0] == code or (code, blob[0]) == (Code.CONSTANT, Code.ADAPTIVE)
    for mutant in mutated(blob, 1000, np.random.default_rng(0)):
        try:
            decoded = read_symbols(Source(mutant), len(symbols), 2, given=known)
        except PayloadError:
            continue
        assert len(decoded) == len(symbols)
        assert int(decoded.max()) < 2


def test_mutants_of_indices() -> None:
    random = np.random.default_rng(0)
    clustered = np.unique(np.concatenate([random.integers(a, a + 3000, 2000) for a in (500, 70_000)]))
    for index, code in ((np.sort(random.choice(90_000, 400, replace=False)), 1), (clustered, 2)):
        sink = Sink()
        write_indices(sink, index, 90_000)
        assert sink.getvalue()[0] == code
        for mutant in mutated(sink.getvalue(), 2000, random):
            try:
                decoded = read_indices(Source(mutant), len(index), 90_000)
            except PayloadError:
                continue
            assert len(decoded) == len(index)
            assert decoded[0] >= 0
            assert decoded[-1] < 90_000
            assert bool((np.diff(decoded) > 0).all())


def test_a_symbol_outside_the_alphabet_is_refused() -> None:
    with pytest.raises(PayloadError, match="symbol"):
        read_symbols(Source(b"\x00\x07\x07"), 3, 3)


def _indices_again(index: np.ndarray, size: int) -> np.ndarray:
    sink = Sink()
    write_indices(sink, index, size)
    source = Source(sink.getvalue())
    again = read_indices(source, len(index), size)
    source.finish()
    return again
