"""Does an input fit a network? One sentence if not."""

from __future__ import annotations

import math

from laconic.core import ConfigError


def flat_size(model: str, shape: tuple[int, ...], classes: int) -> int:
    """Number of values of one input, for networks that take any shape.

    >>> flat_size("mlp", (1, 28, 28), 10)
    784
    """
    check_outputs(model, classes)
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"model {model!r} got inputs of shape {_text(shape)}, "
            "but it needs at least one value per example, such as (784,) or (1, 28, 28)."
        )
    return math.prod(shape)


def image_size(model: str, shape: tuple[int, ...], classes: int, *, side: int = 1) -> tuple[int, tuple[int, int]]:
    """Channels, then height and width, of images whose sides have at least `side` pixels.

    >>> image_size("lenet5", (1, 28, 30), 10, side=16)
    (1, (28, 30))
    """
    check_outputs(model, classes)
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < side:
        raise ConfigError(
            f"model {model!r} got inputs of shape {_text(shape)}, "
            f"but it needs images (channels, height, width) of at least {side}×{side} pixels."
        )
    return shape[0], (shape[1], shape[2])


def check_outputs(model: str, classes: int) -> None:
    """Refuse a network without outputs."""
    if classes < 1:
        raise ConfigError(f"model {model!r} needs at least 1 output, got {classes}.")


def _text(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))
