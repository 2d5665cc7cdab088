"""What travels between server and nodes: a few words in JSON, and frames.

The frames are those of every engine, and the only bytes that `bytes_up` and `bytes_down` count. The words around them
say what is asked and where the client stands; whatever in them is not as agreed raises `PayloadError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from laconic.core import PayloadError, tree_sha256

VERSION = 3
"""Of the words. Frames have a version of their own."""
HELD_LOST = "held_lost"
"""The reason of a client that does not hold what the server believes: it is sent the whole way from the start."""
_WORDS = 1 << 20  # characters of JSON that are read at all
_STATE = r"|[0-9]{1,10}\.[0-9a-f]{32}"

Number = Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]
StateName = Annotated[str, StringConstraints(pattern=f"^({_STATE})$")]
"""What stands for a client's state: the round that made it, and a digest. Empty for none."""
Figures = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")], float], Field(max_length=64)
]


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    version: int = VERSION


class Call(_Words):
    """What the server asks of a node: who it is (`hello`), a local update (`train`), or its own score (`evaluate`).

    `held` names the tree that the client holds and its own frame builds on: that of every client at first, if empty.
    Without it, frames are for all: `after` is the round after which they begin, where they build on what came before;
    without that, there is one frame, and it is a full snapshot. States before the one that counted in round `floor`
    will not be asked for again.
    """

    kind: Literal["hello", "train", "evaluate"]
    client: Number = 0
    clients: Number = 0
    round: Number = 0
    evaluate: bool = False
    personal: StateName = ""
    codec: StateName = ""
    held: StateName | None = None
    after: Number | None = None
    floor: Number = 0


class Answer(_Words):
    """What a node says: its client's number (`here`), a local update, a score, or why there is none (`failed`)."""

    kind: Literal["here", "done", "score", "failed"]
    client: Number = 0
    personal: StateName = ""
    codec: StateName = ""
    held: StateName = ""
    """The tree that the client holds now, where it was sent a frame of its own."""
    examples: Number | None = None
    """Examples of the score, where there is one."""
    sums: Figures = Field(default_factory=dict)
    metrics: Figures = Field(default_factory=dict)
    seconds: float = 0.0
    reason: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{0,40}$")] = ""
    detail: Annotated[str, StringConstraints(max_length=1000)] = ""
    heard: bool = True


def held_name(round: int, held: Mapping[str, Tensor]) -> str:
    """What both ends call the tree that a client holds since a round.

    >>> import torch
    >>> held_name(3, {"w": torch.ones(2)})
    '3.e684abaf8f5339316374da0fb0487134'
    """
    return f"{round}.{tree_sha256(held)[:32]}"


Words = TypeVar("Words", bound=_Words)


class Envelope(NamedTuple):
    """Words and frames as one Flower record holds them: the frames are one opaque value.

    >>> envelope = Envelope.around(Call(kind="train", client=3), [b"frame"])
    >>> envelope.open(Call).client, envelope.frames()
    (3, [b'frame'])
    """

    words: str
    lengths: str
    payload: bytes

    @classmethod
    def around(cls, words: _Words, frames: Sequence[bytes] = ()) -> Envelope:
        """An envelope around words and frames."""
        return cls(
            words.model_dump_json(exclude_defaults=True), " ".join(str(len(f)) for f in frames), b"".join(frames)
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Envelope:
        """The envelope that a record holds."""
        words, lengths, payload = (values.get(name) for name in cls._fields)
        if not (isinstance(words, str) and isinstance(lengths, str) and isinstance(payload, bytes)):
            raise PayloadError("envelope", "a message without words, lengths and payload; is it one of laconic's?")
        if len(words) > _WORDS or len(lengths) > _WORDS:
            raise PayloadError("envelope", f"{len(words) + len(lengths)} characters around a payload")
        return cls(words, lengths, payload)

    def open(self, kind: type[Words]) -> Words:
        """The words."""
        try:
            words = kind.model_validate_json(self.words)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "words"
            raise PayloadError("envelope", f"{where}: {first['msg']}") from None
        if words.version != VERSION:
            raise PayloadError(
                "version", f"messages of version {words.version}, but this side speaks {VERSION}; update laconic"
            )
        return words

    def frames(self) -> list[bytes]:
        """The frames."""
        numbers = self.lengths.split()
        if not all(number.isascii() and number.isdigit() and len(number) < 16 for number in numbers):
            raise PayloadError("envelope", "lengths that are no numbers")
        lengths = list(map(int, numbers))
        if sum(lengths) != len(self.payload):
            raise PayloadError("truncated", f"{sum(lengths)} bytes were announced, {len(self.payload)} came")
        frames, start = [], 0
        for length in lengths:
            frames.append(self.payload[start : start + length])
            start += length
        return frames
