"""Sizes as people write them: "20 MB", "1 GiB", 4096."""

from __future__ import annotations

import re

from laconic.core.errors import ConfigError

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def num_bytes(size: int | str, *, what: str) -> int:
    """A number of bytes, given as such or as text; `what` names the setting in errors.

    >>> num_bytes("1.5 MB", what="link.memory"), num_bytes("2GiB", what="link.memory"), num_bytes(0, what="link.memory")
    (1500000, 2147483648, 0)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"{what} must not be negative, got {size}.")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _BY_LOWER.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise ConfigError(f"{what} must be bytes or a size such as '20 MB' or '1 GiB', got {size!r}.")
    return round(float(match[1]) * factor)
