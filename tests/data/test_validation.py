from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from laconic.core import DataError
from laconic.data import Federation, digits, with_rotated_client, with_validation


def test_every_client_gives_its_share_and_nothing_is_lost() -> None:
    whole = digits(clients=10, partition={"kind": "label_shards", "shards_per_client": 2})
    held = with_validation(whole, fraction=0.1, seed=3)
    for client in range(10):
        before, after = (set(f.client(client).train.index.tolist()) for f in (whole, held))
        assert after < before
        assert len(before - after) == round(0.1 * len(before))
    rows = torch.cat([held.train.index, held.validation.index])
    assert sorted(rows.tolist()) == sorted(whole.train.index.tolist())
    assert torch.equal(held.common, whole.common)
    assert len(whole.validation) == 0


def test_it_follows_the_seed() -> None:
    first, again, other = (with_validation(digits(clients=4), seed=seed).held for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_device_that_joins_later_is_no_part_of_it() -> None:
    held = with_validation(digits(clients=4))
    later = with_rotated_client(held, train=50, test=10)
    assert torch.equal(later.held, held.held)


def test_refusals() -> None:
    whole = digits(clients=4)
    with pytest.raises(DataError, match="among both training and validation rows"):
        replace(whole, held=whole.train.index[:1])
    with pytest.raises(DataError, match=r"must lie between 0 and 1, got 1\.0"):
        with_validation(digits(clients=4), fraction=1.0)
    ones = Federation.from_clients([(np.ones((1, 2)), [0]), (np.ones((1, 2)), [1])], test=(np.ones((2, 2)), [0, 1]))
    with pytest.raises(DataError, match="too few examples"):
        with_validation(ones)
