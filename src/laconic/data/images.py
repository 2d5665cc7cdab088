"""From encoded images to tensors: decoding and scaling."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core import ConfigError, DataError

Scaling = Literal["unit", "symmetric", "mnist", "fashion_mnist", "cifar10", "imagenet"]
"""How pixels become inputs: a mean and a standard deviation per channel, of pixels in [0, 1]."""

_SCALINGS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "unit": ((0.0,), (1.0,)),
    "symmetric": ((0.5,), (0.5,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def scale(pixels: NDArray[np.uint8], scaling: str) -> Tensor:
    """Bytes, channel-first, to float32 inputs `(pixels / 255 - mean) / std`.

    >>> scale(np.array([[[[0, 255]]]], dtype=np.uint8), "symmetric")
    tensor([[[[-1.,  1.]]]])
    """
    if scaling not in _SCALINGS:
        raise ConfigError(f"normalize must be one of {', '.join(_SCALINGS)}, got {scaling!r}.")
    mean, std = _SCALINGS[scaling]
    channels = pixels.shape[1]
    if len(mean) not in (1, channels):
        raise ConfigError(
            f"normalize = {scaling!r} is for {len(mean)} channels, but these images have {channels}; "
            "use 'unit' or 'symmetric'."
        )
    x = torch.from_numpy(pixels).to(torch.float32).div_(255)
    if scaling != "unit":
        x.sub_(torch.tensor(mean).view(1, -1, 1, 1)).div_(torch.tensor(std).view(1, -1, 1, 1))
    return x


def decode(blobs: Iterable[bytes | None], *, channels: int | None, size: int | None, where: str) -> NDArray[np.uint8]:
    """Encoded images (PNG, WebP, JPEG …) to one array of bytes (examples, channels, height, width).

    `channels` is 1 or 3, or None to follow the first image. `size` makes all images so wide and high; without it
    they must be alike.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(f'{where}: decoding images needs Pillow; run: pip install "laconic[data]"') from None
    arrays: list[NDArray[np.uint8]] = []
    # One thread: images as small as these are mostly Python, and two threads were 1.5 times slower than one.
    for row, blob in enumerate(blobs):
        if blob is None:
            raise DataError(f"{where}: row {row} holds no image bytes; embed the images in the parquet file.")
        try:
            with Image.open(io.BytesIO(blob)) as image:
                if channels is None:
                    channels = 1 if image.mode in ("1", "L", "I;16") else 3
                mode = "L" if channels == 1 else "RGB"
                picture = image if image.mode == mode else image.convert(mode)
                if size is not None and picture.size != (size, size):
                    picture = picture.resize((size, size), Image.Resampling.BILINEAR)
                array = np.asarray(picture)
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{where}: row {row} is no readable image ({error}); is the file damaged?") from None
        if arrays and array.shape != arrays[0].shape:
            raise DataError(
                f"{where}: row {row} is {array.shape[1]}×{array.shape[0]} pixels, but the first image is "
                f"{arrays[0].shape[1]}×{arrays[0].shape[0]}; set size to make them alike."
            )
        arrays.append(array)
    if not arrays:
        return np.zeros((0, channels or 1, size or 1, size or 1), dtype=np.uint8)
    stacked = np.stack(arrays)
    if stacked.ndim == 3:
        return stacked[:, None]
    return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
