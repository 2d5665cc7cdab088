from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.codecs import BROADCAST, HEADER_BYTES, CodecId, Direction, Header, seal, unseal
from laconic.core import ConfigError, PayloadError

UP = Header(direction=Direction.UP, codec=CodecId.EDEN, round=4, client=17, fingerprint=b"12345678", weight=600)
DOWN = dataclasses.replace(UP, direction=Direction.DOWN, client=BROADCAST, weight=0)


def expected(header: Header) -> dict[str, object]:
    return {k: v for k, v in dataclasses.asdict(header).items() if k != "weight"}


def refused(frame: bytes, header: Header = UP) -> str:
    with pytest.raises(PayloadError) as caught:
        unseal(frame, **expected(header))
    return caught.value.reason


def test_the_layout_is_what_the_specification_says() -> None:
    frame = seal(UP, b"\xaa\xbb")
    assert HEADER_BYTES == 40
    assert frame.hex(" ", -4) == (
        "4c41434e 01012500 04000000 11000000 31323334 35363738 58020000 02000000 00000000 e4dd930c aabb"
    )


@given(st.binary(max_size=100), st.sampled_from([UP, DOWN]))
def test_round_trip(payload: bytes, header: Header) -> None:
    assert unseal(seal(header, payload), **expected(header)) == (header, payload)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("direction", {"direction": Direction.DOWN, "weight": 0}),
        ("codec", {"codec": CodecId.DRIVE}),
        ("codec", {"codec": 12345}),
        ("round", {"round": 3}),
        ("client", {"client": 18}),
        ("fingerprint", {"fingerprint": b"87654321"}),
        ("weight", {"weight": 0}),
    ],
)
def test_what_is_not_expected_is_refused(reason: str, change: dict[str, object]) -> None:
    assert refused(seal(dataclasses.replace(UP, **change), b"x")) == reason


def test_a_weight_on_the_way_down_is_refused() -> None:
    assert refused(seal(dataclasses.replace(DOWN, weight=1), b"x"), DOWN) == "weight"


def test_magic_version_and_length() -> None:
    frame = seal(UP, b"payload")
    assert refused(b"PK" + frame[2:]) == "magic"
    assert refused(frame[:4] + b"\x02" + frame[5:]) == "version"
    assert refused(frame + b"\0") == "trailing"
    assert refused(frame[:28] + (2**63).to_bytes(8, "little") + frame[36:]) == "truncated"


def test_every_prefix_is_refused() -> None:
    frame = seal(UP, bytes(range(100)))
    assert {refused(frame[:n]) for n in range(len(frame))} == {"truncated"}


def test_every_flipped_bit_is_refused() -> None:
    frame = seal(UP, bytes(range(100)))
    for position in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[position // 8] ^= 1 << position % 8
        assert refused(bytes(flipped)) in {"magic", "version", "truncated", "trailing", "checksum"}


@pytest.mark.parametrize("field", ["direction", "codec", "round", "client", "weight"])
def test_a_header_out_of_range_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"Header.{field}"):
        dataclasses.replace(UP, **{field: 2**32})
    with pytest.raises(ConfigError, match=f"Header.{field}"):
        dataclasses.replace(UP, **{field: -1})


def test_frames_may_be_any_bytes_like_object() -> None:
    frame = seal(UP, b"payload")
    assert bytes(unseal(memoryview(frame), **expected(UP))[1]) == b"payload"
