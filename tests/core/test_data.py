from __future__ import annotations

import pytest
import torch

from laconic.core import Part, channels_last


def part(*rows: int) -> Part:
    return Part(torch.arange(20.0).reshape(10, 2), torch.arange(10), torch.tensor(rows, dtype=torch.int64))


def test_a_part_is_its_rows_in_order() -> None:
    x, y = part(7, 3, 3).tensors()
    assert y.tolist() == [7, 3, 3]
    assert x[:, 0].tolist() == [14.0, 6.0, 6.0]


def test_whole() -> None:
    whole = Part.whole(torch.zeros(4, 2), torch.arange(4))
    assert len(whole) == 4
    assert whole.tensors()[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (99, [5])])
def test_batches_cover_everything_once(size: int, sizes: list[int]) -> None:
    batches = list(part(9, 0, 4, 2, 6).batches(size))
    assert [len(y) for _, y in batches] == sizes
    assert torch.cat([y for _, y in batches]).tolist() == [9, 0, 4, 2, 6]
    assert all(torch.equal(x[:, 0], 2.0 * y) for x, y in batches)


def test_order_is_of_positions_not_of_rows() -> None:
    batches = list(part(9, 0, 4).batches(2, torch.tensor([2, 0, 1])))
    assert [y.tolist() for _, y in batches] == [[4, 9], [0]]


def test_a_part_copies_nothing_until_it_is_asked() -> None:
    x = torch.zeros(10, 2)
    lazy = Part(x, torch.arange(10), torch.tensor([1]))
    x[1] = 5
    assert lazy.tensors()[0].tolist() == [[5.0, 5.0]]
    lazy.tensors()[0].zero_()
    assert x[1].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("channels", [1, 3])
def test_batches_have_the_order_of_the_pool(channels: int) -> None:
    images = torch.randn(20, channels, 6, 5)
    plain = Part.whole(images, torch.arange(20))
    turned = Part.whole(channels_last(images), torch.arange(20))
    order = torch.randperm(20)
    conv = torch.nn.Conv2d(channels, 4, 3)
    for (x, y), (same, labels) in zip(plain.batches(8, order), turned.batches(8, order), strict=True):
        assert torch.equal(x, same)
        assert torch.equal(y, labels)
        assert x.is_contiguous()
        assert same.stride(1) == 1
        assert conv(same).stride(1) == 1  # torch goes by it
