"""The property checks of the compressors: bias, error, scale, rotation."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic.codecs import parse
from laconic.codecs.quantize import _centroids, _lloyd_residual, cell_of, half_centroids
from laconic.codecs.rotate import chunks, hadamard_, uniform_rotation
from laconic.core import ConfigError, Key, Shared, spec_of

TABLE = {
    1: [0.79788],
    2: [0.45278, 1.51042],
    3: [0.24509, 0.75601, 1.34391, 2.15195],
    4: [0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259],
}

cached_parse = functools.cache(parse)


def coded(text: str, x: Tensor, seed: int = 0) -> Tensor:
    codec, tree, shared = cached_parse(text), {"x": x}, Shared(Key.from_seed(seed))
    blob, _ = codec.encode(tree, shared, {})
    return codec.decode(blob, spec_of(tree), shared)["x"]


def gaussian(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def nmse(estimate: Tensor, x: Tensor) -> float:
    return float((estimate - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("bits", TABLE)
def test_lloyd_max_values_are_those_of_the_literature(bits: int) -> None:
    assert half_centroids(bits) == pytest.approx(TABLE[bits], abs=1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_lloyd_max_values_are_the_fixed_point(bits: int) -> None:
    half = half_centroids(bits)
    assert len(half) == 2 ** (bits - 1)
    assert list(half) == sorted(half)
    assert float(_lloyd_residual(torch.tensor(half, dtype=torch.float64))[0].abs().max()) < 1e-10


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("deviation", [1.0, 0.037, 1e20])
def test_cells_are_those_of_the_nearest_value(bits: int, deviation: float) -> None:
    x = gaussian(20_000, seed=bits) * 1.5 * deviation
    nearest = (x.double()[:, None] - deviation * _centroids(bits).double()[None, :]).abs().argmin(dim=1)
    cells = cell_of(x, bits, deviation).long()
    distance = (_centroids(bits)[cells] * deviation - x).abs(), (_centroids(bits)[nearest] * deviation - x).abs()
    assert float((cells != nearest).float().mean()) < 1e-3
    torch.testing.assert_close(*distance, rtol=1e-3, atol=1e-5 * deviation)


def test_the_edges_of_cells_are_searched_exactly() -> None:
    half = torch.tensor(half_centroids(8), dtype=torch.float64)
    edges = ((half[1:] + half[:-1]) / 2).float()
    around = torch.cat([edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(0.0))])
    expected = 128 + torch.bucketize(around, edges)
    assert torch.equal(cell_of(around, 8, 1.0).long(), expected)
    assert torch.equal(cell_of(-around, 8, 1.0).long(), 255 - expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drive", 0.571),
        ("drive_mse", 0.363),
        ("eden:bits=1", 0.571),
        ("eden:bits=2", 0.134),
        ("eden:bits=3", 0.0359),
        ("eden:bits=4", 0.0096),
        ("signsgd", 0.363),
        ("terngrad", 1.0),
        ("eden:bits=0.5", 2 * math.pi / 2 - 1),
    ],
)
def test_the_error_is_that_of_the_table_within_3_percent(text: str, expected: float) -> None:
    errors = [nmse(coded(text, x, seed), x) for seed in range(3) for x in [gaussian(1 << 17, seed)]]
    assert sum(errors) / len(errors) == pytest.approx(expected, rel=0.03)


def test_the_error_after_rotation_does_not_depend_on_the_input() -> None:
    """A vector that is anything but Gaussian: few large values, many tiny ones."""
    x = gaussian(1 << 16) ** 5
    assert nmse(coded("eden:bits=2", x), x) == pytest.approx(0.134, rel=0.03)


def test_qsgd_on_the_whole_vector_of_conv6() -> None:
    x = gaussian(2_262_602)
    assert nmse(coded("qsgd:levels=512", x), x) == pytest.approx(1.35, rel=0.03)


@pytest.mark.parametrize("text", ["terngrad:clip=0", "qsgd:levels=3", "int8", "randk:fraction=0.3"])
def test_exactly_unbiased(text: str) -> None:
    x = gaussian(12) + 0.3
    estimates = torch.stack([coded(text, x, seed) for seed in range(10_000)]).double()
    deviation = estimates.std(dim=0) / 100
    assert bool(((estimates.mean(dim=0) - x).abs() <= 4.5 * deviation + 1e-6).all())


def inputs(size: int) -> dict[str, Tensor]:
    """What is easy to send, and what is not: all of it in one place, or nearly all."""
    spike, tails, sparse = (
        0.1 * gaussian(size, 1) / math.sqrt(size),
        gaussian(size, 2) / gaussian(size, 3),
        gaussian(size),
    )
    spike[size // 2] = -1.0
    sparse[torch.arange(size) % 10 != 0] = 0.0
    return {
        "normal": gaussian(size),
        "spike": torch.eye(size)[size // 2],
        "spike and noise": spike,
        "heavy tails": tails.clamp(-1000, 1000),
        "constant": torch.full((size,), 0.3),
        "sparse": sparse,
        "a large last value": torch.cat([gaussian(size - 1), torch.tensor([30.0])]),
    }


@pytest.mark.parametrize("text", ["drive", *(f"eden:bits={bits}" for bits in (0.5, 1, 2, 2.5, 4))])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1023, 1024, 1025, 1500, 3000])
def test_every_chunk_is_unbiased(text: str, size: int) -> None:
    """Along x and across it: the error of a mean of n is an n-th of the error of one, in the last chunk as in all."""
    count = 100
    for name, x in inputs(size).items():
        found = torch.stack([coded(text, x, seed) for seed in range(count)]).double()
        tail = slice(chunks(size)[0] if size > chunks(size)[0] else 0, None)
        for part in (slice(None), tail):
            y, mean, each = x[part].double(), found[:, part].mean(dim=0), found[:, part]
            along = each @ y / y.square().sum().clamp(min=1e-30)
            error = float((each - mean).square().sum(dim=1).mean())
            if float(y.square().sum()):
                assert float(along.mean()) == pytest.approx(1, abs=4.5 * float(along.std()) / count**0.5 + 1e-5), name
            # A sum of squares: of many it is close to its mean, of few it may be several times as large.
            most = 2 if len(y) > 400 else 8
            assert float((mean - y).square().sum()) <= most * error / count + 1e-9 * float(x.square().sum()), name


def test_the_last_of_1025_values_comes_back() -> None:
    """It was 1.253, 1.711, 0.952 times as large at 1, 2, 4 bits, when all chunks had one scale."""
    x = torch.cat([gaussian(1024), torch.tensor([0.7])])
    for text in ("drive", "drive_mse", "eden:bits=0.1", "eden:bits=1", "eden:bits=2", "eden:bits=2.5", "eden:bits=4"):
        assert float(coded(text, x)[-1]) == pytest.approx(0.7, rel=1e-5)
    for text in ("topk:fraction=1 | eden:bits=2", "randk:fraction=1 | drive", "eden:bits=4,per_leaf=true"):
        assert float(coded(text, x)[-1]) == pytest.approx(0.7, rel=1e-5)


def test_a_uniform_rotation_is_orthogonal_and_favours_no_direction() -> None:
    drawn = np.stack([uniform_rotation(5, Key.from_seed(seed)) for seed in range(4000)])
    np.testing.assert_allclose(drawn @ drawn.transpose(0, 2, 1), np.broadcast_to(np.eye(5), drawn.shape), atol=1e-12)
    assert np.abs(drawn.mean(axis=0)).max() < 4.5 / math.sqrt(5 * 4000)
    np.testing.assert_allclose((drawn**4).mean(axis=0), 3 / (5 * 7), rtol=0.15)


@pytest.mark.parametrize("text", ["drive", "eden:bits=1", "eden:bits=2", "eden:bits=2.5", "eden:bits=0.5"])
def test_unbiased_over_random_signs_within_2_percent(text: str) -> None:
    x = gaussian(1024)
    count = 1500
    mean = torch.stack([coded(text, x, seed) for seed in range(count)]).double().mean(dim=0)
    assert float(mean @ x.double() / x.double().square().sum()) == pytest.approx(1, abs=0.02)
    assert nmse(mean, x.double()) < 1.3 * nmse(coded(text, gaussian(1 << 16)), gaussian(1 << 16)) / count + 0.02**2


def test_the_mean_of_n_estimates_has_an_nth_of_the_error() -> None:
    x = gaussian(1 << 14)
    mean = torch.stack([coded("drive", x, seed) for seed in range(16)]).mean(dim=0)
    assert nmse(mean, x) == pytest.approx(0.571 / 16, rel=0.05)


def test_eden_with_one_bit_is_drive() -> None:
    for size in (1, 5, 1030, 70_000):
        x = gaussian(size)
        torch.testing.assert_close(coded("eden:bits=1", x), coded("drive", x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["signsgd", "terngrad", "qsgd:levels=5", "int8", "drive", "eden:bits=2.5", "topk:fraction=0.1"]
)
def test_scale_equivariance(text: str) -> None:
    x = gaussian(3000)
    assert torch.equal(coded(text, 8 * x), 8 * coded(text, x))
    mismatch = (coded(text, 3 * x) - 3 * coded(text, x)).abs() > 1e-4 * float(x.abs().max())
    assert float(mismatch.float().mean()) < 0.01  # 3x rounds, which may change a symbol here and there


@pytest.mark.parametrize("exponent", [0, 1, 2, 5, 6, 7, 10, 13, 17])
def test_hadamard_is_orthogonal_and_its_own_inverse(exponent: int) -> None:
    x = gaussian(1 << exponent)
    y = hadamard_(x.clone())
    torch.testing.assert_close(hadamard_(y.clone()), x * len(x), rtol=1e-4, atol=1e-4 * len(x))
    torch.testing.assert_close(y.square().sum(), x.square().sum() * len(x), rtol=1e-4, atol=0)


def test_hadamard_is_the_matrix_of_walsh() -> None:
    index = torch.arange(256)
    parity = torch.tensor([[bin(int(i & j)).count("1") % 2 for j in index] for i in index])
    assert torch.equal(hadamard_(torch.eye(256)[37]), 1.0 - 2 * parity[37])


@pytest.mark.parametrize("size", [1, 2, 3, 1023, 1024, 1025, 2_262_602, 1_933_258])
def test_chunks_waste_next_to_nothing(size: int) -> None:
    sides = chunks(size)
    assert all(side & (side - 1) == 0 or side <= 64 for side in sides)
    assert size <= sum(sides) < size + 512


def test_one_value_comes_back_exactly() -> None:
    for text in ("signsgd", "drive", "drive_mse", "qsgd:levels=1", "int8", "topk:fraction=0.01", "terngrad"):
        assert coded(text, torch.tensor([-0.7])).tolist() == pytest.approx([-0.7])


def test_terngrad_clips_at_its_deviations() -> None:
    x = torch.cat([gaussian(10_000), torch.tensor([50.0])])
    assert float(coded("terngrad", x).abs().max()) == pytest.approx(2.5 * float(x.std()), rel=1e-3)
    assert float(coded("terngrad:clip=0", x).abs().max()) == 50.0


@pytest.mark.parametrize(
    "text", ["eden:bits=0", "eden:bits=8.5", "qsgd:levels=0", "topk:fraction=0", "topk:fraction=1.5"]
)
def test_settings_out_of_range(text: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        parse(text)
