"""Explicit randomness.

Nothing in laconic reads or seeds a global generator: whoever needs randomness is handed a `Key`.
What both ends of a link must regenerate (initial weights, rotations, sub-models) comes from
`Key.numpy()`, a Philox generator whose words are the same on every machine and with every version. What numpy makes of
the words (permutations, samples) is pinned by tests; what must never change is built on the words themselves.

A user's own module may still use torch's global generator (`nn.Dropout`, initialisers in a
constructor). `isolated` makes such code a function of a key as well, and restores the generator.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Key:
    """A seed path: fold names and numbers in, then draw.

    >>> key = Key.from_seed(0)
    >>> key.fold_in("client", 3) == key.fold_in("client").fold_in(3)
    True
    >>> float(key.fold_in("dropout").numpy().random()) == float(key.fold_in("dropout").numpy().random())
    True
    """

    digest: bytes

    @classmethod
    def from_seed(cls, seed: int) -> Key:
        """The root of a run's randomness."""
        return cls(bytes(16)).fold_in("laconic", seed)

    def fold_in(self, *parts: int | str) -> Key:
        """A new key for a named purpose; different paths give independent streams."""
        digest = self.digest
        for part in parts:
            # numpy's integers are integers too: which kind of 3 it is must not matter.
            folded = b"s" + part.encode() if isinstance(part, str) else b"i%d" % operator.index(part)
            digest = hashlib.blake2b(digest + folded, digest_size=16, person=b"laconic.key").digest()
        return Key(digest)

    def seed(self) -> int:
        """Eight bytes of this key as an integer: what a message carries, or a foreign library takes."""
        return int.from_bytes(self.digest[:8], "little")

    def numpy(self) -> np.random.Generator:
        """A Philox generator: the same words on every machine and with every version."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self.digest, "little")))

    def raw(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """At least so many bytes of the Philox words, little-endian: what must never change is built on these.

        >>> len(Key.from_seed(0).raw(9))
        16
        """
        words = self.numpy().bit_generator.random_raw(-(-num_bytes // 8))
        return np.asarray(words, "<u8").view(np.uint8)

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator: fast and local, for draws that only one party makes."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.seed() & 0x7FFF_FFFF_FFFF_FFFF)
        return generator


@contextmanager
def isolated(key: Key) -> Iterator[None]:
    """Let code that uses torch's global generator run as a function of `key`, leaving no trace.

    >>> with isolated(Key.from_seed(1)):
    ...     a = torch.rand(1)
    >>> with isolated(Key.from_seed(1)):
    ...     b = torch.rand(1)
    >>> bool(a == b)
    True
    """
    seed = key.seed() & 0x7FFF_FFFF_FFFF_FFFF
    if torch.accelerator.is_available():
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield
        return
    # On the CPU alone: torch.manual_seed would also leave a note, with a stack trace, for a GPU that never comes.
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
