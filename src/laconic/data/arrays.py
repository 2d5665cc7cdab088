"""A user's arrays as tensors of the kinds that laconic trains on, or an error that says what is wrong."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from laconic.core import IGNORED, DataError, predicted

ArrayLike: TypeAlias = Any
"""A tensor, a numpy array, or whatever numpy makes a numeric array of."""


def as_inputs(array: ArrayLike, *, where: str) -> Tensor:
    """Inputs: bytes become floats in [0, 1], floats become float32, other integers (tokens) become int64.

    >>> as_inputs(np.array([[0, 255]], dtype=np.uint8), where="train x")
    tensor([[0., 1.]])
    """
    tensor = _as_tensor(array, where)
    if tensor.dim() < 2:
        raise DataError(
            f"{where} has the shape {tuple(tensor.shape)}, but needs an axis of examples and one of features; "
            "reshape it to (examples, features) or (examples, channels, height, width)."
        )
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.float32).div_(255)
    if tensor.is_floating_point():
        return _finite(tensor.to(torch.float32), where)
    return tensor.to(torch.float32 if tensor.dtype == torch.bool else torch.int64)


def as_targets(array: ArrayLike, *, where: str) -> Tensor:
    """Targets: whole numbers are classes, int64; floats are regression targets, float32 with two axes at least.

    Whole numbers of more than one axis are targets of tokens or pixels, −100 where nothing is to be predicted.

    >>> as_targets([0.5, 1.5], where="train y")
    tensor([[0.5000],
            [1.5000]])
    """
    tensor = _as_tensor(array, where)
    if tensor.is_floating_point():
        values = _finite(tensor.to(torch.float32), where)
        return values.unsqueeze(1) if values.dim() == 1 else values
    if tensor.dim() < 1:
        raise DataError(f"{where} is a single number; give one target per example.")
    if tensor.dim() > 1 and tensor[:1].numel() == 1:
        raise DataError(
            f"{where} has the shape {tuple(tensor.shape)}, but class labels need one axis; "
            "give one whole number per example."
        )
    labels = tensor.to(torch.int64)
    counted = predicted(labels)
    if len(counted) and int(counted.min()) < 0:
        unless = "" if labels.dim() == 1 else f" ({IGNORED} is for tokens that do not count)"
        raise DataError(
            f"{where} has the label {int(counted.min())}, but classes are numbered from 0 on{unless}; "
            "np.unique(y, return_inverse=True)[1] numbers them."
        )
    return labels


def count_classes(labels: Tensor, classes: int | None) -> int:
    """Number of classes: given, or one more than the largest label; 0 for regression."""
    if labels.is_floating_point():
        if classes:
            raise DataError(f"classes = {classes}, but y holds floats; give whole numbers as labels.")
        return 0
    found = int(labels.max()) + 1 if len(labels) else 0
    if classes is not None and found > classes:
        raise DataError(f"the label {found - 1} does not exist among {classes} classes, 0 to {classes - 1}.")
    return classes if classes is not None else found


def check_pair(x: Tensor, y: Tensor, *, where: str) -> None:
    """Refuse inputs and targets of unequal length."""
    if len(x) != len(y):
        raise DataError(f"{where} has {len(x)} inputs but {len(y)} targets; give one target per input.")


def _as_tensor(array: ArrayLike, where: str) -> Tensor:
    if isinstance(array, Tensor):
        tensor = array.detach().cpu()
    else:
        try:
            values = np.asarray(array)
        except ValueError as error:
            raise DataError(f"{where} is no rectangular array ({error}); make all examples the same shape.") from None
        if values.dtype.kind not in "biuf":
            hint = (
                "np.unique(y, return_inverse=True)[1] numbers text labels."
                if where.endswith("y")
                else "encode it as numbers first."
            )
            raise DataError(f"{where} has the dtype {values.dtype}, which is not numeric; {hint}")
        if values.dtype.kind == "u" and values.dtype != np.uint8:
            values = values.astype(np.int64)  # torch computes little with wider unsigned numbers
        if values.dtype.kind == "f" and values.dtype.itemsize > 8:
            values = values.astype(np.float64)
        tensor = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
    if tensor.is_complex():
        raise DataError(f"{where} has the dtype {tensor.dtype}; laconic trains on real numbers.")
    return tensor


def _finite(tensor: Tensor, where: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        row = int(
            (~torch.isfinite(tensor))
            .flatten(1 if tensor.dim() > 1 else 0)
            .reshape(len(tensor), -1)
            .any(1)
            .int()
            .argmax()
        )
        raise DataError(f"{where} is not finite in row {row}; remove or fill such examples.")
    return tensor
