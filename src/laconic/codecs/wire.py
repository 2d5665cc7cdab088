"""The frame: forty bytes before every payload, in both directions. docs/wire.md is its normative text.

>>> header = Header(direction=Direction.UP, codec=CodecId.FLOAT32, round=4, client=17, fingerprint=bytes(8), weight=600)
>>> frame = seal(header, b"payload")
>>> len(frame)
47
>>> unseal(frame, direction=Direction.UP, codec=CodecId.FLOAT32, round=4, client=17, fingerprint=bytes(8))[1]
b'payload'
>>> unseal(frame, direction=Direction.UP, codec=CodecId.FLOAT32, round=5, client=17, fingerprint=bytes(8))
Traceback (most recent call last):
    ...
laconic.core.errors.PayloadError: a frame of round 4, but this is round 5; is it late, or sent twice? [round]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c
import numpy as np

from laconic.core import ConfigError, PayloadError

MAGIC = b"LACN"
VERSION = 1
BROADCAST = 0xFFFF_FFFF
"""The client number of a frame that goes to everyone."""
_FIELDS = struct.Struct("<4sBBHII8sIQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Direction(IntEnum):
    """Which way a frame goes."""

    DOWN = 0
    UP = 1


class CodecId(IntEnum):
    """Numbers of the codecs on the wire. A number is never given to another codec, not even after years.

    32, 33 and 34 were drive, drive_mse and eden with one scale for all chunks.
    """

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    SIGNSGD = 16
    SIGNSGD_MV = 17
    TERNGRAD = 18
    QSGD = 19
    INT8 = 20
    DRIVE = 35
    DRIVE_MSE = 36
    EDEN = 37
    TOPK = 48
    RANDK = 49
    THRESHOLD = 50
    CHAIN = 64
    MASK = 65
    BY_LEAF = 66
    MRC = 67
    LOWRANK = 80
    LEAN = 96
    CUSTOM = 0x8000
    """This and everything above it is for users' own codecs."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a frame says about its payload."""

    direction: int
    codec: int
    round: int
    client: int
    fingerprint: bytes
    weight: int = 0
    """The client's number of examples; 0 on the way down."""

    def __post_init__(self) -> None:
        limits = {"direction": 1, "codec": 0xFFFF, "round": BROADCAST, "client": BROADCAST, "weight": BROADCAST}
        for field, largest in limits.items():
            if not 0 <= (value := getattr(self, field)) <= largest:
                raise ConfigError(f"Header.{field} must be between 0 and {largest}, got {value}.")
        if len(self.fingerprint) != 8:
            raise ConfigError(f"Header.fingerprint must be 8 bytes, got {len(self.fingerprint)}.")


def seal(header: Header, payload: bytes) -> bytes:
    """A frame: header, checksum, payload."""
    h = header
    fields = _FIELDS.pack(
        MAGIC, VERSION, h.direction, h.codec, h.round, h.client, h.fingerprint, h.weight, len(payload)
    )
    return b"".join((fields, _CHECKSUM.pack(_crc32c(fields, payload)), payload))


def unseal(
    frame: bytes, *, direction: int, codec: int, round: int, client: int, fingerprint: bytes
) -> tuple[Header, bytes]:
    """The header and payload of a frame that is whole, unaltered and the one expected; else `PayloadError`.

    First whether it is a frame that we can read, then whether it is complete, then whether it is unaltered, and only
    then what it says: a damaged round number is damage, not another round.
    """
    if len(frame) < HEADER_BYTES:
        raise PayloadError("truncated", f"{len(frame)} bytes, but a frame begins with a header of {HEADER_BYTES}")
    fields = bytes(frame[: _FIELDS.size])
    magic, version, *rest, weight, length = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise PayloadError("magic", f"a frame begins with {MAGIC!r}, this one with {magic!r}; is it a laconic message?")
    if version != VERSION:
        raise PayloadError(
            "version",
            f"wire format {version}, but this side speaks {VERSION}; "
            f"update laconic on the {'other' if version < VERSION else 'receiving'} side",
        )
    received = len(frame) - HEADER_BYTES
    if received < length:
        raise PayloadError("truncated", f"a payload of {length} bytes was announced, {received} came")
    if received > length:
        raise PayloadError("trailing", f"a payload of {length} bytes was announced, {received} came")
    payload = bytes(memoryview(frame)[HEADER_BYTES:])
    (checksum,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    if checksum != (computed := _crc32c(fields, payload)):
        raise PayloadError(
            "checksum", f"the frame was altered on its way: checksum {checksum:08x}, computed {computed:08x}"
        )
    given_direction, given_codec, given_round, given_client, given_fingerprint = rest
    if given_direction != direction:
        raise PayloadError("direction", f"a frame of direction {given_direction}, but {direction} was expected")
    if given_codec != codec:
        raise PayloadError(
            "codec",
            f"a payload of codec {_name(given_codec)}, but {_name(codec)} was agreed; check [link] on both ends",
        )
    if given_fingerprint != fingerprint:
        raise PayloadError(
            "fingerprint",
            f"a message of run {given_fingerprint.hex()}, but this is {fingerprint.hex()}; "
            "do model, method, codecs and seed agree on both ends?",
        )
    if given_round != round:
        raise PayloadError(
            "round", f"a frame of round {given_round}, but this is round {round}; is it late, or sent twice?"
        )
    if given_client != client:
        raise PayloadError("client", f"a frame of client {given_client}, but client {client} was expected")
    if (weight == 0) != (direction == Direction.DOWN):
        raise PayloadError(
            "weight",
            f"a weight of {weight} examples on the way {'down' if weight else 'up'}; "
            f"{'it must be 0 there' if weight else 'a reply counts at least one'}",
        )
    header = Header(
        direction=direction, codec=codec, round=round, client=client, fingerprint=fingerprint, weight=weight
    )
    return header, payload


def _crc32c(fields: bytes, payload: bytes) -> int:
    # An array over the payload, because the C function wants a buffer that says it is read-only.
    body = np.frombuffer(memoryview(payload).toreadonly(), np.uint8)
    return int(google_crc32c.extend(google_crc32c.value(fields), body))


def _name(codec: int) -> str:
    names = {int(known): known.name.lower() for known in CodecId}
    return names.get(codec, str(codec))
