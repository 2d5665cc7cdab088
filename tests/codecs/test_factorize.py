"""Low rank, and stages that see shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from laconic.codecs import CodecId, Floats, Pipeline, Read, Sink, Source, Write, check_codec, eden, ef, lowrank, parse
from laconic.core import Codec, ConfigError, Key, PayloadError, Shared, Tree, spec_of

SHARED = Shared(Key.from_seed(3))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(codec: Codec, tree: Tree, seed: int = 3) -> tuple[int, Tree]:
    shared = Shared(Key.from_seed(seed))
    blob, _ = codec.encode(tree, shared, {})
    return len(blob), codec.decode(blob, spec_of(tree), shared)


def test_a_matrix_of_that_rank_comes_back() -> None:
    tree = {"w": gaussian(40, 3) @ gaussian(3, 60, seed=1)}
    size, decoded = coded(lowrank(3), tree)
    assert size == 4 * 3 * (40 + 60)
    torch.testing.assert_close(decoded["w"], tree["w"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(coded(lowrank(9), tree)[1]["w"], tree["w"], rtol=1e-4, atol=1e-5)


def test_it_is_powersgd() -> None:
    """P = orthogonalised(M·S), Q = Mᵀ·P: the projection on the columns of M·S, by a QR decomposition."""
    from laconic.codecs.draws import uniform

    m = gaussian(30, 50)
    start = uniform(SHARED.key.fold_in("w").fold_in(0), 4 * 50).view(4, 50).double() - 0.5
    p, _ = torch.linalg.qr(m.double() @ start.T)
    torch.testing.assert_close(coded(lowrank(4), {"w": m})[1]["w"].double(), p @ (p.T @ m.double()), rtol=0, atol=1e-5)


def test_the_error_is_near_the_best_and_falls_with_the_rank() -> None:
    """Of quickly falling singular values, one power iteration finds the large ones."""
    m = gaussian(64, 64) * (0.8 ** torch.arange(64.0))
    singular = torch.linalg.svdvals(m)
    errors = []
    for rank in (1, 2, 4):
        decoded = [coded(lowrank(rank), {"w": m}, seed)[1]["w"] for seed in range(10)]
        errors.append(sum(float((found - m).square().sum()) for found in decoded) / len(decoded))
        assert errors[-1] < 2.5 * float(singular[rank:].square().sum())
    assert errors == sorted(errors, reverse=True)


def test_a_convolution_is_a_matrix_with_a_row_for_each_output() -> None:
    tree = {"w": gaussian(16, 8, 3, 3)}
    size, decoded = coded(lowrank(2), tree)
    assert size == 4 * 2 * (16 + 72)
    assert decoded["w"].shape == (16, 8, 3, 3)
    flat = {"w": tree["w"].reshape(16, 72)}
    assert torch.equal(coded(lowrank(2), flat)[1]["w"], decoded["w"].reshape(16, 72))


@pytest.mark.parametrize("shape", [(), (5,), (1, 100), (100, 1), (4, 4), (2, 3, 0), (0, 3)])
def test_what_would_not_get_shorter_passes_as_it_is(shape: tuple[int, ...]) -> None:
    tree = {"w": gaussian(*shape)}
    size, decoded = coded(lowrank(2), tree)
    assert size == 4 * tree["w"].numel()
    assert torch.equal(decoded["w"], tree["w"])


def test_a_codec_after_it_codes_the_factors() -> None:
    tree = {"w": gaussian(40, 2) @ gaussian(2, 60, seed=1), "b": gaussian(60)}
    size, decoded = coded(lowrank(2) | eden(8), tree)
    assert size < 400
    assert float((decoded["w"] - tree["w"]).square().sum() / tree["w"].square().sum()) < 0.001


def test_feedback_gets_everything_across_in_the_end() -> None:
    codec, tree = ef(lowrank(2)), {"w": gaussian(20, 30)}
    state, total = codec.init_state(spec_of(tree)), torch.zeros(20, 30)
    for turn in range(60):
        shared = Shared(Key.from_seed(turn))
        blob, state = codec.encode(tree if not turn else {"w": torch.zeros(20, 30)}, shared, state)
        total += codec.decode(blob, spec_of(tree), shared)["w"]
    torch.testing.assert_close(total, tree["w"], rtol=0, atol=0.02)


def test_huge_values_are_refused_by_the_sender() -> None:
    with pytest.raises(PayloadError, match="diverged"):
        coded(lowrank(1), {"w": torch.full((30, 30), 3e38)})


def test_factors_that_are_no_numbers_are_refused() -> None:
    tree = {"w": gaussian(10, 10)}
    blob, _ = lowrank(1).encode(tree, SHARED, {})
    for value in (float("inf"), float("nan"), 3e38):
        bad = torch.tensor([value]).numpy().tobytes() * (len(blob) // 4)
        with pytest.raises(PayloadError, match="non_finite"):
            lowrank(1).decode(bad, spec_of(tree), SHARED)


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        parse("lowrank:rank=0")


@dataclass(frozen=True)
class RowMeans:
    """The mean of every row of a matrix; all else as it is: a user's own stage with shapes."""

    rows: int = 0
    quantizes: ClassVar[bool] = False

    def shaped(self, shape: tuple[int, ...]) -> RowMeans | None:
        return RowMeans(shape[0]) if len(shape) > 1 and shape[0] else None

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        rest(values.view(self.rows, -1).mean(dim=1))

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        return rest(self.rows).repeat_interleave(size // self.rows)


def test_a_users_own_stage_sees_shapes() -> None:
    means = Pipeline((RowMeans(),), Floats(), text="means", id=CodecId.CUSTOM, per_leaf=True)
    tree = {"w": torch.tensor([[1.0, 3.0], [5.0, 5.0]]), "b": torch.tensor([1.0, 2.0])}
    size, decoded = coded(means, tree)
    assert size == 4 * (2 + 2)
    assert decoded["w"].tolist() == [[2.0, 2.0], [5.0, 5.0]]
    assert decoded["b"].tolist() == [1.0, 2.0]
    check_codec(means)
    check_codec(means | eden(2))
    check_codec(ef(means))


def test_shapes_are_seen_leaf_by_leaf_and_first() -> None:
    with pytest.raises(ConfigError, match="per_leaf=True"):
        Pipeline((RowMeans(),), Floats(), text="means", id=CodecId.CUSTOM)
    with pytest.raises(ConfigError, match="must come first"):
        parse("topk:fraction=0.1 | lowrank:rank=2")
    assert parse("mask | lowrank:rank=2").per_leaf  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Twice:
    """Hand on the same values twice, and give back what came the second time."""

    second: bool
    quantizes: ClassVar[bool] = False

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        rest(values)
        rest(values)

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        return (rest(size), rest(size))[self.second]


def test_what_is_handed_on_twice_is_rounded_by_other_draws() -> None:
    x = {"w": gaussian(500)}
    first, second = (
        coded(Pipeline((Twice(which),), Floats(), text="twice", id=CodecId.CUSTOM) | parse("qsgd:levels=9"), x)[1]["w"]  # type: ignore[operator]
        for which in (False, True)
    )
    errors = torch.stack([first - x["w"], second - x["w"]])
    assert abs(float(torch.corrcoef(errors)[0, 1])) < 0.2
