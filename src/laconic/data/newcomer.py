"""A client that comes later, with data of another kind: rotated images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from laconic.core import DataError, Key
from laconic.data.assignment import IntArray, Ragged
from laconic.data.federation import Federation


def with_rotated_client(
    federation: Federation, *, train: int = 3000, test: int = 500, degrees: int = 90, seed: int = 0
) -> Federation:
    """The federation with one more client, the last: copies of images drawn from all clients, rotated.

    `train` of the training images and `test` of the common test images, drawn without replacement, each rotated
    counter-clockwise by 90, 180 or 270 `degrees`. The common test set stays as it is.

    >>> from laconic.data import digits
    >>> with_rotated_client(digits(clients=5), train=100, test=20)
    Federation(digits: 6 clients, 1538 training and 359 test examples, 10 classes, shape (1, 8, 8))
    """
    if degrees not in (90, 180, 270):
        raise DataError(f"{federation.name}: images can be rotated by 90, 180 or 270 degrees, got {degrees}.")
    if len(federation.shape) != 3:
        raise DataError(f"{federation.name}: only images can be rotated, but inputs have the shape {federation.shape}.")
    if federation.shape[1] != federation.shape[2] and degrees != 180:
        raise DataError(f"{federation.name}: images of {federation.shape[1]}×{federation.shape[2]} change their shape.")
    rng = Key.from_seed(seed).fold_in("newcomer").numpy()
    drawn = []
    for what, wanted, all_ in (("train", train, federation.train_rows.flat), ("test", test, federation.common.numpy())):
        if not 1 <= wanted <= len(all_):
            raise DataError(f"{federation.name}: a newcomer can have 1 to {len(all_)} {what} images, got {wanted}.")
        drawn.append(np.sort(rng.choice(all_, size=wanted, replace=False)))
    rows = torch.from_numpy(np.concatenate(drawn))
    first = len(federation.x)
    own = [np.arange(first, first + train), np.arange(first + train, first + train + test)]
    protected = federation.protected
    return replace(
        federation,
        x=torch.cat([federation.x, torch.rot90(federation.x[rows], degrees // 90, (2, 3))]),
        y=torch.cat([federation.y, federation.y[rows]]),
        train_rows=_appended(federation.train_rows, own[0]),
        test_rows=_appended(federation.test_rows, own[1]),
        protected=None if protected is None else torch.cat([protected, protected[rows]]),
    )


def _appended(rows: Ragged, own: IntArray) -> Ragged:
    return Ragged.from_lists([*rows, own])
