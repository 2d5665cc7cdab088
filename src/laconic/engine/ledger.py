"""Bytes and messages, counted where frames pass by."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass


@dataclass
class Ledger:
    """What a run has sent so far. `bytes_*` are lengths of real frames; `paper_bytes` is what a paper would print."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0
    paper_bytes: int = 0

    def up(self, num_bytes: int) -> None:
        """A frame came up."""
        self.bytes_up += num_bytes
        self.messages_up += 1

    def down(self, num_bytes: int, *, messages: int = 1) -> None:
        """So many bytes went down, to so many clients."""
        self.bytes_down += num_bytes
        self.messages_down += messages

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def bits_per_parameter(self, parameters: int) -> tuple[float, float]:
        """Mean bits per parameter and message, up and down.

        >>> Ledger(bytes_up=400, messages_up=1).bits_per_parameter(100)[0]
        32.0
        """
        up = 8 * self.bytes_up / (max(self.messages_up, 1) * parameters)
        down = 8 * self.bytes_down / (max(self.messages_down, 1) * parameters)
        return up, down

    def as_dict(self) -> dict[str, int]:
        """For files."""
        return asdict(self)
