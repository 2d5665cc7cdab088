"""Training examples that are held out, to decide by: test data is for figures that are reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from laconic.core import DataError, Key
from laconic.data.assignment import Ragged
from laconic.data.federation import Federation
from laconic.data.holdout import hold_out


def with_validation(federation: Federation, *, fraction: float = 0.1, seed: int = 0) -> Federation:
    """The federation with a share of every client's training examples held out, all of them one validation set.

    A client with one example keeps it.

    >>> from laconic.data import digits
    >>> held = with_validation(digits(clients=5), fraction=0.2)
    >>> held, len(held.validation)
    (Federation(digits: 5 clients, 1150 training and 359 test examples, 10 classes, shape (1, 8, 8)), 288)
    """
    if not 0 < fraction < 1:
        raise DataError(f"{federation.name}: the share to validate on must lie between 0 and 1, got {fraction}.")
    rows = federation.train_rows
    kept, held = hold_out(rows.owner, fraction=fraction, key=Key.from_seed(seed).fold_in("validation"), every=True)
    if not len(held):
        raise DataError(f"{federation.name}: its clients have too few examples to hold any out.")
    sizes = np.bincount(rows.owner[kept], minlength=len(rows))
    return replace(
        federation,
        train_rows=Ragged.from_lists(np.split(rows.flat[kept], np.cumsum(sizes)[:-1])),
        held=torch.from_numpy(rows.flat[held]),
    )
