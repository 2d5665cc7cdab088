"""Where codecs write to and read from: a payload as a sequence of blocks, every length checked."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from laconic.core import PayloadError

SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""Scales are 0 or lie in between: far from where float32 overflows or loses its precision."""

Bytes = npt.NDArray[np.uint8]


def in_range(size: float) -> float:
    """The size of values that are to be sent, if it is one that codecs can handle."""
    if not 0.0 <= size <= LARGEST:
        raise PayloadError("range", f"values of the size {size:.3g} cannot be quantized; has training diverged?")
    return size


class Sink:
    """A payload that is being written.

    `ideal_bits` adds up what each writer says its symbols are worth by their empirical entropy: the figure that the
    real length is compared with, never a substitute for it.
    """

    def __init__(self) -> None:
        self.ideal_bits = 0.0
        self._blocks: list[bytes | memoryview] = []

    def write(self, block: bytes | memoryview, *, ideal_bits: float | None = None) -> None:
        """Append bytes; they are worth their length unless said otherwise."""
        self._blocks.append(block)
        self.ideal_bits += 8 * len(block) if ideal_bits is None else ideal_bits

    def write_uint(self, value: int) -> None:
        """Append a count or a length: seven bits a byte, least significant first."""
        groups = bytearray()
        while value > 0x7F:
            groups.append(value & 0x7F | 0x80)
            value >>= 7
        groups.append(value)
        self.write(bytes(groups))

    def write_scale(self, value: float) -> float:
        """Append a non-negative number as float32 and return it as the reader will see it; below 2^-100 it is 0."""
        rounded = float(np.float32(value)) if in_range(value) >= SMALLEST else 0.0
        self.write(struct.pack("<f", rounded))
        return rounded

    def getvalue(self) -> bytes:
        """The payload."""
        return b"".join(self._blocks)


class Source:
    """A payload that is being read: whoever asks for more than there is gets `PayloadError`.

    >>> source = Source(bytes([1, 2, 3]))
    >>> bytes(source.read(2)), source.left
    (b'\\x01\\x02', 1)
    >>> source.read(2)
    Traceback (most recent call last):
        ...
    laconic.core.errors.PayloadError: 2 more bytes were expected, 1 came [truncated]
    """

    def __init__(self, blob: bytes | memoryview) -> None:
        self._view = memoryview(blob).toreadonly().cast("B")
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._view) - self._at

    def read(self, size: int) -> memoryview:
        """The next bytes, not copied."""
        if size > self.left:
            raise PayloadError("truncated", f"{size} more bytes were expected, {self.left} came")
        self._at += size
        return self._view[self._at - size : self._at]

    def array(self, size: int) -> Bytes:
        """The next bytes as a read-only array, not copied."""
        return np.frombuffer(self.read(size), np.uint8)

    def read_uint(self, largest: int) -> int:
        """A count or a length of at most `largest`, in its shortest form."""
        value = shift = 0
        while True:
            (group,) = self.read(1)
            value |= (group & 0x7F) << shift
            shift += 7
            if value > largest or (group == 0 and shift > 7):
                raise PayloadError("count", f"a count that should be at most {largest}, in its shortest form")
            if group < 0x80:
                return value
            if shift > 63:
                raise PayloadError("count", f"a count that should be at most {largest} runs on and on")

    def read_scale(self) -> float:
        """A float32 that is 0 or between 2^-100 and 2^100."""
        raw = self.read(4)
        (value,) = struct.unpack("<f", raw)
        if bytes(raw) != bytes(4) and not SMALLEST <= value <= LARGEST:
            raise PayloadError("scale", f"a scale of {value:.3g}, but it must be 0 or between 2^-100 and 2^100")
        return float(value)

    def finish(self) -> None:
        """Nothing may be left."""
        if self.left:
            raise PayloadError("trailing", f"{self.left} bytes more than this model's message has")
