"""The digits that ship with scikit-learn: real data without a download."""

from __future__ import annotations

import numpy as np
import torch

from laconic.core import Key
from laconic.data.federation import Federation, pooled
from laconic.data.holdout import check_limit, hold_out
from laconic.data.partition import PartitionSpec


def digits(
    *, clients: int = 10, partition: PartitionSpec = "iid", seed: int = 0, limit: int | None = None
) -> Federation:
    """1,797 handwritten digits of 8×8 pixels from scikit-learn, in [0, 1]; a fifth is the common test set.

    The test set is the same for every seed.

    >>> digits(clients=20, partition={"kind": "dirichlet", "alpha": 0.3})
    Federation(digits: 20 clients, 1438 training and 359 test examples, 10 classes, shape (1, 8, 8))
    """
    check_limit(limit, "digits")
    from sklearn.datasets import load_digits  # takes a while to import

    pixels, labels = load_digits(return_X_y=True)
    labels = np.asarray(labels, dtype=np.int64)
    train, test = hold_out(labels, fraction=0.2, key=Key.from_seed(0).fold_in("digits"))
    train = train[:limit]
    rows = np.concatenate([train, test])
    x = torch.from_numpy(np.asarray(pixels[rows], dtype=np.float32)).div_(16).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels[rows])
    return pooled("digits", x, y, num_train=len(train), clients=clients, partition=partition, seed=seed, classes=10)
