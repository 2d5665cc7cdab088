"""docs/wire.md suffices: a reader written from it opens all golden frames, and both it and laconic keep its vectors."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from laconic.codecs import CodecId, parse
from laconic.codecs.compose import _keys
from laconic.codecs.quantize import half_centroids
from laconic.core import ClientInfo, Goal, Key, Leaf, Method, PayloadError, Shared, Tree, describe
from laconic.engine.round import (
    EVERYONE,
    Agreement,
    Link,
    _snapshot,
    client_round,
    open_reply,
    send,
    send_snapshot,
    to_everyone,
)
from laconic.methods import Depth, KeepLocal, Solver, fedavg, fedopt, fedpm, lg_fedavg
from laconic.testing import small_federation, small_task

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "wire.md").read_text()
GOLDEN: dict[str, dict[str, Any]] = json.loads((HERE / "codecs.json").read_text())
EXPECT: dict[str, Any] = {"direction": 1, "round": 3, "client": 7, "fingerprint": b"golden!!"}


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


reader: Any = _loaded(HERE / "reader.py")
SPEC = {
    "weight": reader.Leaf((36, 11)),
    "mask": reader.Leaf((13,), "bool"),
    "bias": reader.Leaf((45,), "float64"),
    "count": reader.Leaf((3,), "int16"),
}


def frame_of(text: str) -> bytes:
    return bytes.fromhex(GOLDEN[text]["frame"])


def opened(text: str, frame: bytes, **other: Any) -> tuple[int, bytes]:
    return reader.open_frame(frame, **({"codec": reader.parse(text).number} | EXPECT | other))


def rotates(text: str) -> bool:
    return "drive" in text or "eden" in text


def test_the_reader_imports_nothing_of_ours() -> None:
    """Nor torch: the standard library, numpy and constriction."""
    found = set()
    for node in ast.walk(ast.parse((HERE / "reader.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            found.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.Name):
            assert node.id not in ("__import__", "exec", "eval", "importlib")
    assert found - set(sys.stdlib_module_names) == {"numpy", "constriction"}
    assert "importlib" not in found


# --- golden frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", GOLDEN)
def test_golden_frames(text: str) -> None:
    """Bit for bit; after a rotation up to the order of its sums, which the page leaves open."""
    weight, payload = opened(text, frame_of(text))
    tree = reader.decode(text, payload, SPEC, reader.root_key(2026))
    assert weight == 600
    assert list(tree) == list(SPEC)
    assert all(tree[name].shape == leaf.shape and str(tree[name].dtype) == leaf.dtype for name, leaf in SPEC.items())
    assert tree["mask"].tolist() == [k % 3 == 0 for k in range(13)]
    assert tree["count"].tolist() == [5, -3, 300]
    values = [*tree["weight"].reshape(-1)[::23].tolist(), *tree["bias"][::7].tolist()]
    stored = GOLDEN[text]["some_decoded"]
    assert values == (pytest.approx(stored, rel=1e-5, abs=1e-5) if rotates(text) else stored)


@pytest.mark.parametrize("text", GOLDEN)
def test_altered_golden_frames_are_refused(text: str) -> None:
    frame = frame_of(text)
    for length in range(len(frame)):
        assert reason(lambda length=length: opened(text, frame[:length])) == "truncated"
    for more in (b"\0", b"LACN", frame):
        assert reason(lambda more=more: opened(text, frame + more)) == "trailing"
    # Every bit of the header, and some of the payload: a checksum by hand takes its time.
    for bit in [*range(320), *random.Random(text).sample(range(320, 8 * len(frame)), 40)]:
        altered = bytearray(frame)
        altered[bit // 8] ^= 1 << bit % 8
        said = reason(lambda altered=altered: opened(text, bytes(altered)))
        field = "magic" if bit < 32 else "version" if bit < 40 else "checksum"
        assert said == field or (224 <= bit < 288 and said in ("truncated", "trailing")), bit


def sealed(frame: bytes) -> bytes:
    """The frame with a checksum that fits."""
    return frame[:36] + reader.crc32c(frame[:36] + frame[40:]).to_bytes(4, "little") + frame[40:]


def test_what_a_frame_says_is_checked_in_the_order_of_the_page() -> None:
    """All that follow are wrong as well: the first one of the page's table is named."""
    frame = bytearray(frame_of("float32"))
    table = re.findall(r"^\| (\d+) \| `(\w+)` \| ", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in table] == list(range(1, 13))
    wrong = {5: 0, 6: 99, 16: 0, 8: 4, 12: 8, 24: 0}  # offset: a byte that is not what was agreed
    reasons = [name for _, name in table][6:]
    assert reasons == ["direction", "codec", "fingerprint", "round", "client", "weight"]
    right = {at: frame[at] for at in wrong}
    frame[24:28] = bytes(4)
    for at, byte in wrong.items():
        frame[at] = byte
    assert reason(lambda: opened("float32", bytes(frame))) == "checksum"
    for at, named in zip(wrong, reasons, strict=True):
        assert reason(lambda: opened("float32", sealed(bytes(frame)))) == named
        frame[at] = right[at]
    frame[24] = 1
    assert opened("float32", sealed(bytes(frame)))[0] == 1
    frame[5] = 0
    assert reason(lambda: opened("float32", sealed(bytes(frame)), direction=0)) == "weight"
    for at, named in ((4, "version"), (0, "magic")):
        frame[at] ^= 255
        assert reason(lambda: opened("float32", bytes(frame) + b"trailing")) == named
    assert reason(lambda: opened("float32", bytes(frame)[:39])) == "truncated"


def reason(attempt: Callable[[], Any]) -> str:
    with pytest.raises(reader.Refused) as caught:
        attempt()
    return str(caught.value.reason)


# --- other messages ---------------------------------------------------------------------------------------------------


def message() -> tuple[Tree, dict[str, Leaf], dict[str, Any]]:
    """Larger than the golden one, with ragged and exact leaves and expected bits; laconic's spec and the reader's."""
    rng = np.random.Generator(np.random.Philox(7))
    mask = torch.from_numpy(rng.random((40, 50)) < 0.1)
    kept = int(mask.sum())
    tree = {
        "w": torch.from_numpy((rng.standard_normal((100, 60)) ** 3).astype(np.float32)),
        "mask": mask,
        "dense": torch.from_numpy(rng.random(3000) < np.linspace(0, 1, 3000)),
        "kept": torch.from_numpy(rng.standard_normal(kept)),
        "few": torch.from_numpy(rng.integers(0, 4, 500)),
        "signed": torch.from_numpy(rng.integers(-9, 9, 30).astype(np.int32)),
        "half": torch.from_numpy(rng.standard_normal(70)).to(torch.bfloat16),
        "mean": torch.from_numpy(rng.standard_normal(20)).to(torch.bfloat16),
        "none": torch.zeros(0),
        "one": torch.tensor(0.5, dtype=torch.float16),
        "stats": torch.from_numpy(rng.standard_normal(int(mask[0].sum())).astype(np.float32)),
        "conv": torch.from_numpy(rng.standard_normal((8, 3, 3, 3)).astype(np.float32)),
        "flags": torch.from_numpy(rng.random(100) < 0.3),
        "wide": torch.from_numpy(rng.standard_normal((3, 200))),
    }
    more: dict[str, dict[str, Any]] = {
        "kept": {"length": lambda known: int(known["mask"].sum())},
        "mean": {"exact": True},
        "stats": {"exact": True, "length": lambda known: int(known["mask"][0].sum())},
        "dense": {"expected": torch.linspace(0, 1, 3000)},
    }
    shapes = {name: tuple(leaf.shape) for name, leaf in tree.items()} | {"kept": (2000,), "stats": (50,)}
    ours = {name: Leaf(shapes[name], leaf.dtype, **more.get(name, {})) for name, leaf in tree.items()}
    more["dense"] = {"expected": np.asarray(more["dense"]["expected"])}
    theirs = {
        name: reader.Leaf(shapes[name], str(leaf.dtype).removeprefix("torch."), **more.get(name, {}))
        for name, leaf in tree.items()
    }
    return tree, ours, theirs


TEXTS = [text for text in GOLDEN if not text.startswith("ef")]
TEXTS += ["eden:bits=0.1", "eden:bits=1.5,per_leaf=true", "topk:fraction=0.2,per_leaf=true | drive"]
TEXTS += ["topk:fraction=0.001", "threshold:level=100", "threshold:level=0"]
TEXTS += ["randk:fraction=0.3 | mask", "signsgd_mv:step=3e-05"]
TEXTS += [
    "lowrank:rank=3",
    "lowrank:rank=3 | int8",
    "lowrank:rank=3 | eden:bits=1.5",
    "lowrank:rank=1 | randk:fraction=0.5",
]
TEXTS += ["lowrank:rank=2 | topk:fraction=0.2 | randk:fraction=0.5", "mask | lowrank:rank=3"]
TEXTS += [
    "by_leaf(*: float32)",
    "lean:bits=2",
    "lean:nmse=0.01,mode=nearest",
    "by_leaf(w*: lean:bits=0.5, *: mask)",
    "by_leaf(m*: mask, kept: eden:bits=1.5, [!a-g]*: topk:fraction=0.1,per_leaf=true | int8, *: float16)",
    "by_leaf(mask: mask:model=layer, mean: int8, kept: randk:fraction=0.5, *[deg]: lowrank:rank=2, *: mask)",
    "by_leaf(dense: bfloat16, ?[ae]*: by_leaf(mask: mask, wide: lowrank:rank=1 | drive, *: int8), *: mask | signsgd)",
    "by_leaf(d*: mask | randk:fraction=0.2, *: lowrank:rank=3 | randk:fraction=0.5 | qsgd:levels=9)",
]


def same(text: str, found: dict[str, Any], tree: Tree) -> bool:
    assert list(found) == list(tree)
    for name, leaf in tree.items():
        a, b = torch.from_numpy(np.array(found[name])).double(), leaf.double()
        # A value beside the middle between two of float16 or bfloat16 may fall to either side after a rotation.
        near = 2.0**-7 if leaf.dtype in (torch.float16, torch.bfloat16) else 1e-5
        close = torch.allclose(a, b, rtol=near, atol=1e-5 * float(tree["w"].abs().max() + 1))
        if a.shape != b.shape or not (close if rotates(text) and name not in ("mean", "stats") else torch.equal(a, b)):
            return False
    return True


@pytest.mark.parametrize("text", TEXTS)
def test_reads_what_laconic_writes_and_refuses_what_it_refuses(text: str) -> None:
    tree, ours, theirs = message()
    key = Key.from_seed(1).fold_in(text)
    codec, shared = parse(text), Shared.of(ours, key)
    payload, _ = codec.encode(tree, shared, {})
    assert same(text, reader.decode(text, payload, theirs, key.digest), codec.decode(payload, ours, shared))
    rng = random.Random(text)
    for _ in range(40):
        altered = bytearray(payload)
        altered[rng.randrange(min(rng.choice((100, 2000, 100_000)), len(payload)))] = rng.choice((0, 1, 2, 3, 128, 255))
        altered = altered[: rng.choice((len(payload), len(payload), rng.randrange(len(payload))))]
        decoded = outcome(lambda altered=altered: codec.decode(bytes(altered), ours, shared))
        found = outcome(lambda altered=altered: reader.decode(text, bytes(altered), theirs, key.digest))
        assert found == decoded if isinstance(decoded, str) else same(text, found, decoded)


@pytest.mark.parametrize("text", ["lean:bits=0.4,mode=nearest", "lean:step=0.001"])
def test_levels_of_all_kinds_of_leaves(text: str) -> None:
    """Rows, channels and columns, many phases, magnitudes with tokens of their own."""
    random_ = torch.Generator().manual_seed(0)
    shapes = {"conv": (6, 4, 3, 3), "empty": (0, 5), "matrix": (40, 30), "bias": (40,), "one": ()}
    both(text, {name: torch.randn(shape, generator=random_) ** 3 for name, shape in shapes.items()})


def outcome(attempt: Callable[[], Any]) -> Any:
    """What was decoded, or the reason why not."""
    try:
        return attempt()
    except (PayloadError, reader.Refused) as error:
        return error.reason


def both(
    text: str, tree: Tree, expected: Tree | None = None, held: Tree | None = None, bernoulli: tuple[str, ...] = ()
) -> bytes:
    """A payload that laconic reads as it was written, and the reader as laconic does."""
    expected, held = expected or {}, held or {}
    ours = {
        name: Leaf(
            tuple(leaf.shape),
            torch.bool if name in bernoulli else leaf.dtype,
            expected=expected.get(name),
            bernoulli=name in bernoulli,
        )
        for name, leaf in tree.items()
    }
    theirs = {
        name: reader.Leaf(
            leaf.shape,
            str(leaf.dtype).removeprefix("torch."),
            expected=None if name not in expected else leaf.expected.numpy(),
            held=None if name not in held else held[name].numpy(),
            bernoulli=leaf.bernoulli,
        )
        for name, leaf in ours.items()
    }
    shared = replace(Shared.of(ours, Key.from_seed(0)), held=held)
    payload, _ = parse(text).encode(tree, shared, {})
    decoded = parse(text).decode(payload, ours, shared)
    found = reader.decode(text, payload, theirs, reader.root_key(0))
    assert all(np.array_equal(found[name], leaf.numpy()) for name, leaf in decoded.items())
    return payload


k = np.arange(30_000)
spread = np.random.Philox(key=1).random_raw(len(k)) / 2.0**64
PLACES: dict[str, tuple[int, Any]] = {
    "bitmap": (0, spread < 0.4),
    "gaps whose lowest bits are sent": (1, spread < 0.02),
    "gaps that are but steps": (1, spread < 0.2),
    "long steps": (1, (k > 29_900) & (spread < 0.7)),
    "a table": (2, k % 50 < 2),
    "a table and long steps": (2, (k > 20_000) & (k % 10 == 0)),
}


@pytest.mark.parametrize("case", PLACES)
def test_indices_in_every_code(case: str) -> None:
    code, places = PLACES[case]
    payload = both("threshold:level=0", {"w": torch.from_numpy(np.where(places, 1 + k % 5, 0).astype(np.float32))})
    assert payload[1 if places.sum() < 128 else 2] == code  # after the number of indices


@pytest.mark.parametrize("places", [[], range(1000)])
def test_no_indices_and_all_of_them_cost_nothing(places: Any) -> None:
    values = torch.zeros(1000)
    values[list(places)] = 1.0
    assert len(both("threshold:level=0", {"w": values})) == (4002 if places else 1)


SIGNS = {
    "packed": (0, spread < 0.5),
    "constant": (1, k < 0),
    "static": (2, k % 7 == 0),
    "adaptive": (3, spread < np.where(k < 15_000, 0.95, 0.05)),
}


@pytest.mark.parametrize("case", SIGNS)
def test_symbols_in_every_code(case: str) -> None:
    code, negative = SIGNS[case]
    payload = both("signsgd", {"w": torch.from_numpy(np.where(negative, -1, 1).astype(np.float32))})
    assert payload[4] == code


def test_bits_in_every_code() -> None:
    """Few expectations, and more than make contexts of their own."""
    few, many = np.where(k % 2 == 0, 0.1, 0.9), (k % 104 + 0.5) / 104
    drawn, rare = torch.from_numpy(spread < many), torch.from_numpy(spread < 0.1)
    expected = {"m": torch.from_numpy(many)}
    assert both("mask", {"m": torch.from_numpy(spread < 0.5)})[0] == 0
    assert both("mask", {"m": rare})[0] == 1
    assert both("mask", {"m": rare, "none": rare[:0], "ones": rare | True, "n": ~rare})[0] == 2
    assert both("mask", {"n": rare, "m": torch.from_numpy(spread < few)}, {"m": torch.from_numpy(1 - few)})[0] == 3
    assert both("mask", {"m": ~drawn}, expected)[0] == 3
    assert both("mask", {"m": drawn, "n": rare[:9]}, expected)[0] == 4


def test_integers_given_those_held() -> None:
    """Values and changes, few contexts and many, and more levels than make contexts of their own."""
    ten, many = torch.from_numpy(k * 7919 % 211 % 11), torch.from_numpy(k * 7919 % 211)
    rare = torch.from_numpy(spread < 0.1).long()
    found = {
        both("mask", {"n": new.int()}, held={"n": held.int()})[:3]
        for held in (ten, many, ten[:300], many * 0)
        for new in ((held + rare[: len(held)]) % 11, held + rare[: len(held)], held - rare[: len(held)] + 1)
    }
    assert {(code, changes) for code, changes, _ in found} >= {(2, 0), (2, 1)}
    assert len(found) > 3


@pytest.mark.parametrize("text", ["mrc", "mrc:bits=3,kl=1", "mrc:bits=11,kl=20", "mrc | int8"])
def test_bits_that_are_drawn(text: str) -> None:
    """Of many contexts and few, of more than a thousand blocks, of none; beside other leaves."""
    theta = torch.from_numpy(spread)
    few, many = torch.from_numpy(np.where(k % 2 == 0, 0.1, 0.9)), torch.from_numpy((k % 104 + 0.5) / 104)
    for expected in (few, many):
        both(text, {"m": theta}, {"m": expected}, bernoulli=("m",))
        both(
            text, {"n": theta[:5] > 0.5, "m": theta[:900], "w": torch.ones(40)}, {"m": expected[:900]}, bernoulli=("m",)
        )
        assert len(both(text, {"m": expected[:900]}, {"m": expected[:900]}, bernoulli=("m",))) < 400
    both(text, {"m": theta[:200], "l": theta[200:900].reshape(7, 100)}, {"m": few[:200]}, bernoulli=("m", "l"))
    both(text, {"m": theta[:0]}, bernoulli=("m",))


# --- the page's vectors -----------------------------------------------------------------------------------------------


def on_page(label: str) -> list[str]:
    """What stands in backquotes beside a label in a table of the page."""
    (row,) = re.findall(rf"^\| {re.escape(label)} \| (.*) \|$", PAGE, re.MULTILINE)
    return re.findall(r"`([^`]*)`", row)


def test_keys_of_the_page() -> None:
    root = reader.root_key(2026)
    up = reader.up_key(root, 3, 7)
    found = {
        "root of seed 0": reader.root_key(0),
        "root of seed −1": reader.root_key(-1),
        "root of seed 2026": root,
        "of that: round 3": reader.round_key(root, 3),
        "of that: client 7": reader.fold_in(root, "round", 3, "client", 7),
        "of that: message up": up,
        "seed 2026, round 3: message down to client 7": reader.down_key(root, 3, 7),
        "seed 2026, round 3: message down to everyone": reader.down_key(root, 3),
        "of the message up: stage 0": reader.fold_in(up, 0),
        "of the message up: leaf `weight`": reader.fold_in(up, "weight"),
        "of the message up: leaf `größe`": reader.fold_in(up, "größe"),
        "of the message up: leaf `weight`, stage 1": reader.fold_in(up, "weight", 1),
        "of the message up: leaf `weight`, second vector, stage 1": reader.fold_in(up, "weight", "again", 1, 1),
    }
    assert {label: key.hex() for label, key in found.items()} == {label: on_page(label)[-1] for label in found}


def test_laconic_has_the_keys_of_the_page() -> None:
    agreement = Agreement(method=None, link=None, key=Key.from_seed(2026))  # type: ignore[arg-type]
    client = ClientInfo(id=7, round=3, examples=1)
    up = agreement.client_key(client).fold_in("up")
    found = {
        "root of seed 0": Key.from_seed(0),
        "root of seed −1": Key.from_seed(-1),
        "root of seed 2026": agreement.key,
        "of that: round 3": agreement.round_key(3),
        "of that: client 7": agreement.client_key(client),
        "of that: message up": up,
        "seed 2026, round 3: message down to client 7": agreement.round_key(3).fold_in("down", 7),
        "seed 2026, round 3: message down to everyone": agreement.round_key(3).fold_in("down", EVERYONE.id),
        "of the message up: stage 0": up.fold_in(0),
        "of the message up: leaf `weight`": up.fold_in("weight"),
        "of the message up: leaf `größe`": up.fold_in("größe"),
        "of the message up: leaf `weight`, stage 1": up.fold_in("weight").fold_in(1),
        "of the message up: leaf `weight`, second vector, stage 1": second_vector(up.fold_in("weight")).fold_in(1),
    }
    assert {label: key.digest.hex() for label, key in found.items()} == {label: on_page(label)[-1] for label in found}


def second_vector(key: Key) -> Key:
    """The key of what a stage hands on second."""
    _, key = itertools.islice(_keys(key), 2)
    return key


def test_frames_of_a_round_have_the_keys_of_the_page() -> None:
    """Both patterns of kept values are drawn from the seed and what the header says."""
    link = Link(parse("randk:fraction=0.5,per_leaf=true"), parse("randk:fraction=0.5"))
    agreement = Agreement(fedavg(solver=Solver(lr=0.1, batch_size=4)).bind(small_task()), link, Key.from_seed(2026))
    server = agreement.method.init(agreement.key.fold_in("init"))
    server = {name: leaf + 0.1 * torch.sin(9 * leaf) for name, leaf in server.items()}
    known = agreement.first_held()
    spec = {name: reader.Leaf(tuple(leaf.shape)) for name, leaf in known.items()}
    start = {name: leaf.numpy() for name, leaf in known.items()}
    common = {"codec": 49, "round": 3, "fingerprint": agreement.fingerprint}

    frame, (_, held) = send(agreement, server, to_everyone(3), known)
    _, payload = reader.open_frame(frame, direction=0, client=reader.BROADCAST, **common)
    found, kept = reader.read_change(link.down.text, payload, spec, reader.down_key(reader.root_key(2026), 3), start)
    assert all(np.array_equal(found[name], leaf.numpy()) for name, leaf in held.items())

    client = ClientInfo(id=2, round=4, examples=0)
    again = {name: leaf + 0.1 for name, leaf in server.items()}
    frame, (received, after) = send(agreement, again, client, held)
    _, payload = reader.open_frame(frame, direction=0, client=2, **(common | {"round": 4}))
    own = reader.down_key(reader.root_key(2026), 4, 2)
    found, kept = reader.read_change(link.down.text, payload, spec, own, kept)
    assert all(np.array_equal(found[name], leaf.numpy()) for name, leaf in received.items())
    assert all(np.array_equal(kept[name], leaf.numpy()) for name, leaf in after.items())

    client = ClientInfo(id=2, round=3, examples=0)
    _, payload = reader.open_frame(
        send_snapshot(agreement, held, client), direction=0, client=2, **(common | {"codec": 1})
    )
    key = reader.snapshot_key(reader.root_key(2026), 3, 2)
    assert _snapshot(agreement, client)[1].key.digest == key
    found = reader.decode("float32", payload, spec, key)
    assert all(np.array_equal(found[name], leaf.numpy()) for name, leaf in held.items())

    turn = client_round(agreement, held, client, {}, {}, small_federation().client(2))
    weight, payload = reader.open_frame(turn.frame, direction=1, client=2, **common)
    found = reader.decode(link.up.text, payload, spec, reader.up_key(reader.root_key(2026), 3, 2))
    reply = open_reply(agreement, turn.frame, held, client)
    assert weight == reply.client.examples == 8
    assert all(np.array_equal(found[name], leaf.numpy()) for name, leaf in reply.message.items())
    assert any(leaf.any() for leaf in found.values())


def philox(key: bytes, blocks: int) -> list[int]:
    """Philox4x64-10 as the page says it, without numpy."""
    low, drawn = 2**64 - 1, []
    for block in range(1, blocks + 1):
        x = (block, 0, 0, 0)
        k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = (p1 >> 64 ^ x[1] ^ k0, p1 & low, p0 >> 64 ^ x[3] ^ k1, p0 & low)
            k0, k1 = k0 + 0x9E3779B97F4A7C15 & low, k1 + 0xBB67AE8584CAA73B & low
        drawn += x
    return drawn


def test_the_stream_of_the_page() -> None:
    key = bytes.fromhex(on_page("of the message up: stage 0")[-1])
    drawn = philox(key, 25)
    assert [f"{word:016x}" for word in drawn[:5]] == on_page("Philox")
    assert [f"{word:08x}" for word in reader.words(key, 4)] == on_page("words")
    assert "".join(map(str, reader.stream_bits(key, 16))) == on_page("bits")[0]
    raw = b"".join(word.to_bytes(8, "little") for word in drawn)
    assert reader.raw(key, 800).tobytes() == raw
    assert Key(key).raw(800).tobytes() == raw


def test_the_fingerprint_of_the_page() -> None:
    (text,) = re.findall(r"^```text\n(\{.*\})\n```$", PAGE, re.MULTILINE)
    (expected,) = re.findall(r"^has the fingerprint `([0-9a-f]{16})`", PAGE, re.MULTILINE)
    fields = json.loads(text)
    assert reader.canonical(fields) == text.encode()
    fields["key"] = bytes.fromhex(fields["key"])
    assert fields["key"] == reader.root_key(2026)
    assert reader.fingerprint(**fields).hex() == expected == "fc887115277031c3"
    leaves = {"w": (2, 3), "b": (3,), "kept": (6,), "steps": ()}
    theirs = {name: reader.Leaf(shape) for name, shape in leaves.items()}
    theirs |= {"kept": reader.Leaf((6,), length=len), "steps": reader.Leaf((), "int64")}
    ours = {name: Leaf(shape) for name, shape in leaves.items()}
    ours |= {"kept": Leaf((6,), length=len), "steps": Leaf((), torch.int64)}
    assert reader.describe(theirs) == describe(ours) == fields["model"]


# What the page says of settings, written out: all of them, those of the solver beside the others.
SOLVER: dict[str, Any] = {"optimizer": "sgd", "lr": 0.2, "momentum": 0.0, "weight_decay": 0.0, "local_epochs": 5}
SOLVER |= {"local_steps": None, "batch_size": 10, "lr_decay": 1.0, "clip_norm": None}
FEDAVG: dict[str, Any] = {"weighting": "uniform", **SOLVER}
FEDPM: dict[str, Any] = {
    "lambda0": 1.0,
    "reset": "auto",
    "ste": "identity",
    "persist_optimizer": False,
    "scale": "kaiming",
}
FEDPM |= {"shrink": 0.01, "evaluate": "threshold", "threshold": 0.5, "samples": 5, "privacy": None, "spread": 1.0}
FEDPM |= {**SOLVER, "optimizer": "adam", "lr": 0.1, "local_epochs": 3, "batch_size": 128}
LG_FEDAVG: dict[str, Any] = {"global_layers": 1, "global_part": "last", "private": None, "fedavg_rounds": 0}
LG_FEDAVG |= {"goal": None, "goal_on": "validation", "start": "server", "lg_lr": None, "mu": 0.0, "warmup_epochs": 0}
LG_FEDAVG |= {"warmup_after": None, "objective": "supervised", "objective_weight": None, "permutations": 24}
LG_FEDAVG |= {"adversary": {"steps": 1, "optimizer": "sgd", "lr": None, "standardize": False, "weight_decay": 0.0}}
LG_FEDAVG["adversary"]["attributes"] = []
LG_FEDAVG |= {"weighting": "examples", **SOLVER}
KEPT: dict[str, Any] = {"method": {"name": "fedavg", **FEDAVG}, "leaves": ["0.*"], "first": None, "goal": None}
KEPT |= {"start": "server", "solver": None, "first_rounds": 0, "private_epochs": 0, "warmup_epochs": 0}
KEPT |= {"warmup_after": None, "joint": True, "objective": None}
DEPTH: dict[str, Any] = {"end": "last", "global_layers": None, "fraction": None, "private_layers": 1}
SETTINGS: dict[str, tuple[Method, dict[str, Any]]] = {
    "fedavg": (fedavg(), FEDAVG),
    "fedavg of a solver": (fedavg(solver=Solver(lr=1e-05, local_steps=3)), FEDAVG | {"lr": 1e-05, "local_steps": 3}),
    "fedavg of a solver's fields": (fedavg(lr=1, weighting="examples"), FEDAVG | {"lr": 1.0, "weighting": "examples"}),
    "fedopt": (fedopt(), {"server": {"name": "adam", "lr": 0.01, "options": {}}, "mu": 0.0, **FEDAVG}),
    "fedpm": (fedpm(), FEDPM),
    "lg_fedavg": (lg_fedavg(), LG_FEDAVG),
    "lg_fedavg by names": (lg_fedavg(private=("0.*",), goal=0.9), LG_FEDAVG | {"private": ["0.*"], "goal": 0.9}),
    "fedavg+local": (KeepLocal(fedavg(), ("0.*",)), KEPT),
    "kept": (
        KeepLocal(
            fedavg(),
            Depth("last", private_layers=1),
            name="kept",
            first=fedavg(lr=0.5),
            goal=Goal(0.9),
            solver=Solver(lr=0.3),
            warmup_after=2,
            joint=False,
        ),
        KEPT
        | {"leaves": DEPTH, "first": {"name": "fedavg", **FEDAVG, "lr": 0.5}, "solver": SOLVER | {"lr": 0.3}}
        | {"goal": {"accuracy": 0.9, "on": "validation"}, "warmup_after": 2, "joint": False},
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_the_fingerprint_of_a_method(case: str) -> None:
    method, settings = SETTINGS[case]
    link = Link(parse("by_leaf(0.*: int8, *: eden:bits=2.0)"), parse("float32"))
    bound = method.bind(small_task(batch_norm=case != "fedpm"))
    agreement = Agreement(bound, link, Key.from_seed(2026), method.name, method.settings)
    model = {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (6,), "1.bias": (6,), "4.weight": (3, 6), "4.bias": (3,)}
    model |= {"1.running_mean": (6,), "1.running_var": (6,)}
    if case == "fedpm":  # which takes no model with normalisation
        model = {"0.weight": (6, 4), "0.bias": (6,), "3.weight": (3, 6), "3.bias": (3,)}
    spec = {name: reader.Leaf(shape) for name, shape in model.items()}
    found = reader.fingerprint(
        model=reader.describe(spec),
        method=case.split(" ")[0],
        settings=settings,
        up="by_leaf(0.*: int8, *: eden:bits=2)",
        down="float32",
        key=reader.root_key(2026),
    )
    assert agreement.fingerprint == found


def test_numbers_in_canonical_json() -> None:
    numbers = [0.1, 1e-05, 100000.0, 2.0, 2, -0.0, 1e-4, 1.5e16, 123456789012345.0, 1e22, True, None, 'a"\\\n\x1fß']
    text = r'[0.1,1e-05,100000.0,2.0,2,-0.0,0.0001,1.5e+16,123456789012345.0,1e+22,true,null,"a\"\\\n\u001fß"]'
    assert reader.canonical(numbers).decode() == text
    with pytest.raises(ValueError, match="JSON"):
        reader.canonical(float("nan"))


def test_centroids_of_the_page() -> None:
    rows = re.findall(r"^\| (\d) \| ([\d. …]+) \| `([0-9a-f]{8})` \|$", PAGE, re.MULTILINE)
    assert [int(bits) for bits, _, _ in rows] == list(range(1, 9))
    for bits, shown, checksum in rows:
        half = reader.centroids(int(bits))[1 << int(bits) - 1 :]
        assert np.array_equal(half, np.array(half_centroids(int(bits)), np.float32))
        assert f"{reader.crc32c(half.astype('<f4').tobytes()):08x}" == checksum
        first, _, last = shown.partition("…")
        assert [np.float32(c) for c in first.split()] == half[: len(first.split())].tolist()
        assert not last or np.float32(last) == half[-1]


def test_codecs_of_the_page() -> None:
    """Numbers as in the catalogue; texts as the page spells them are what laconic makes of them."""
    names = {codec.name.lower(): int(codec) for codec in CodecId}
    assert names == {**reader.NUMBERS, "chain": reader.CHAIN, "custom": 32768}
    assert reader.crc32c(b"123456789") == 0xE3069283
    for text in [
        *GOLDEN,
        *TEXTS,
        "ef(topk:fraction=0.01 | eden:bits=4,per_leaf=true)",
        "ef(by_leaf(w: int8, *: mask))",
    ]:
        assert parse(text).text == text
        assert parse(text).id == reader.parse(text).number
    spelled = {"eden:bits=2.0": "eden:bits=2", "signsgd:per_leaf=true,scale=unit": "signsgd:scale=unit,per_leaf=true"}
    spelled |= {"mask:model=shared": "mask", "signsgd_mv:step=0.00001": "signsgd_mv:step=1e-05"}
    spelled |= {
        "by_leaf( a:int8,b :topk:fraction=0.10|int8,*:mask)": "by_leaf(a: int8, b: topk:fraction=0.1 | int8, *: mask)"
    }
    assert {given: parse(given).text for given in spelled} == spelled
