"""Golden bytes: what every codec writes for one tree, and what it makes of it again.

After a deliberate change of the wire format: `python tests/golden/test_golden_codecs.py`, and say so in the changelog.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic.codecs import CodecId, Direction, Header, codecs, parse, seal, unseal
from laconic.core import Key, PayloadError, Shared, Tree, spec_of

FILE = Path(__file__).with_name("codecs.json")
TEXTS = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "signsgd",
    "signsgd:scale=unit",
    "signsgd_mv",
    "terngrad",
    "qsgd:levels=4",
    "qsgd:levels=1000",
    "drive",
    "drive:per_leaf=true",
    "drive_mse",
    "eden:bits=0.5",
    "eden:bits=1",
    "eden:bits=2.5",
    "eden:bits=8",
    "topk:fraction=0.05",
    "topk:fraction=0.4",
    "randk:fraction=0.05",
    "threshold:level=1",
    "topk:fraction=0.1 | int8",
    "topk:fraction=0.3 | eden:bits=4",
    "ef(signsgd)",
    "mask",
    "mask:model=layer",
    "mask:model=global",
    "mask:model=raw",
    "mask | eden:bits=2",
    "mrc",
    "mrc:bits=6,kl=2 | eden:bits=2",
    "lowrank:rank=2",
    "lowrank:rank=1 | int8",
    "lean:bits=1",
    "lean:bits=1.5,mode=nearest",
    "lean:step=0.25",
    "by_leaf(weight: eden:bits=2, mask: mask, *: float32)",
)
SHARED = Shared(Key.from_seed(2026))
EXPECT = {"direction": Direction.UP, "round": 3, "client": 7, "fingerprint": b"golden!!"}


def example() -> Tree:
    """Multiples of 1/512 with few digits: every sum of them is exact, in whatever order a machine adds."""
    k = np.arange(441, dtype=np.int64)
    values = ((k * 7919 % 211 - 105) * (k * 104729 % 97 - 48)) / 512
    return {
        "weight": torch.from_numpy(values[:396].astype(np.float32)).reshape(36, 11),
        "mask": torch.from_numpy(k[:13] % 3 == 0),
        "bias": torch.from_numpy(values[396:]),
        "count": torch.tensor([5, -3, 300], dtype=torch.int16),
    }


def frame_of(text: str) -> bytes:
    codec = parse(text)
    blob, _ = codec.encode(example(), SHARED, codec.init_state(spec_of(example())))
    return seal(Header(codec=codec.id, weight=600, **EXPECT), blob)


def decoded(text: str, frame: bytes) -> list[float]:
    codec = parse(text)
    _, blob = unseal(frame, codec=codec.id, **EXPECT)
    tree = codec.decode(blob, spec_of(example()), SHARED)
    assert torch.equal(tree["mask"], example()["mask"])
    assert torch.equal(tree["count"], example()["count"])
    return [*tree["weight"].reshape(-1)[::23].tolist(), *tree["bias"][::7].tolist()]


GOLDEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}


def test_every_codec_of_the_catalogue_has_golden_bytes() -> None:
    assert list(GOLDEN) == list(TEXTS)
    assert {text.split(":")[0] for text in TEXTS} >= set(codecs)
    assert {codec.name.lower() for codec in CodecId} == {*codecs, "chain", "by_leaf", "custom"}


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_and_values(text: str) -> None:
    assert frame_of(text).hex() == GOLDEN[text]["frame"]
    values = decoded(text, bytes.fromhex(GOLDEN[text]["frame"]))
    assert values == pytest.approx(GOLDEN[text]["some_decoded"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("text", TEXTS)
def test_every_prefix_is_refused(text: str) -> None:
    frame = bytes.fromhex(GOLDEN[text]["frame"])
    for length in range(len(frame)):
        with pytest.raises(PayloadError):
            decoded(text, frame[:length])


def test_100_000_flipped_bits_are_refused() -> None:
    """Every single bit of every golden frame, and again until there are 10⁵."""
    frames = [(parse(text).id, bytes.fromhex(golden["frame"])) for text, golden in GOLDEN.items()]
    flips = [(codec, frame, bit) for codec, frame in frames for bit in range(8 * len(frame))]
    accepted = 0
    for codec, frame, bit in itertools.islice(itertools.cycle(flips), max(len(flips), 100_000)):
        altered = bytearray(frame)
        altered[bit // 8] ^= 1 << bit % 8
        try:
            unseal(bytes(altered), codec=codec, **EXPECT)
            accepted += 1
        except PayloadError:
            pass
    assert accepted == 0


if __name__ == "__main__":
    frames = {text: frame_of(text) for text in TEXTS}
    golden = {t: {"frame": f.hex(), "some_decoded": decoded(t, f)} for t, f in frames.items()}
    lines = ",\n".join(f"{json.dumps(t)}: {json.dumps(entry)}" for t, entry in golden.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
