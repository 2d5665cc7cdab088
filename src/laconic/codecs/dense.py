"""The coder of floating-point values as they are: float32, float16, bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.stream import Sink, Source
from laconic.codecs.vector import all_finite, saturate

_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Floats:
    """Values in a floating-point type, little-endian, one after the other; rounded to nearest even.

    A value beyond the range of the type becomes its largest (65504 for float16): an outlier should cost precision,
    not the whole reply.

    >>> sink = Sink()
    >>> Floats("float16").encode(torch.tensor([1.0, 1e6]), 0, sink)
    >>> Floats("float16").decode(Source(sink.getvalue()), 2, 0)
    tensor([1.0000e+00, 6.5504e+04])
    """

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def encode(self, values: Tensor, alphabet: int, sink: Sink) -> None:
        """Write the values."""
        cast = values.to(_TYPES[self.dtype])
        if cast.dtype != torch.float32 and not all_finite(cast):
            saturate(cast)
        sink.write(cast.view(torch.uint8).numpy().data)

    def decode(self, source: Source, size: int, alphabet: int) -> Tensor:
        """Read `size` values as float32."""
        dtype = _TYPES[self.dtype]
        values = torch.empty(size, dtype=dtype)
        np.copyto(values.view(torch.uint8).numpy(), source.array(size * dtype.itemsize))
        return values.to(torch.float32)
