"""What every codec of the catalogue obeys, whatever it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import check_codec, codecs, parse
from laconic.codecs.check import fuzz
from laconic.core import Codec, ConfigError, Key, Leaf, PayloadError, Shared, Tree, spec_of

EVERY = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "signsgd",
    "signsgd:scale=unit",
    "signsgd_mv",
    "terngrad",
    "terngrad:clip=0,per_leaf=true",
    "qsgd:levels=4",
    "qsgd:levels=1000",
    "drive",
    "drive_mse:per_leaf=true",
    "eden:bits=0.3",
    "eden:bits=1",
    "eden:bits=3",
    "eden:bits=4.5",
    "topk:fraction=0.02",
    "topk:fraction=0.5,per_leaf=true",
    "randk:fraction=0.1",
    "threshold:level=0.5",
    "topk:fraction=0.1 | int8",
    "randk:fraction=0.5 | eden:bits=2",
    "threshold:level=0 | float16",
    "ef(topk:fraction=0.1 | eden:bits=4)",
    "ef(signsgd)",
    "lowrank:rank=2",
    "lowrank:rank=1 | int8",
    "ef(lowrank:rank=2 | eden:bits=4)",
    "by_leaf(w*: eden:bits=2, *: float16)",
    "by_leaf(mask: mask, w*: lowrank:rank=2 | int8, *: topk:fraction=0.5,per_leaf=true)",
    "ef(by_leaf(b*: float32, *: signsgd))",
    "mask",
    "mask:model=layer",
    "mask:model=global",
    "mask:model=raw",
    "mask | eden:bits=2",
    "ef(mask | drive)",
    "lean:bits=0.3",
    "lean:bits=6,mode=nearest",
    "lean:nmse=0.1",
    "lean:step=0.01",
    "ef(lean:bits=1)",
    "by_leaf(w*: lean:bits=0.5, *: float32)",
    "mrc",
    "mrc:bits=5,kl=2 | int8",
)
SHARED = Shared(Key.from_seed(5))
UNBOUNDED = ("float32", "float16", "bfloat16", "topk", "randk", "threshold", "lowrank", "mask", "mrc")


def test_every_codec_is_examined() -> None:
    assert {text.split(":")[0] for text in EVERY} >= set(codecs)


@pytest.mark.parametrize("text", EVERY)
def test_the_laws(text: str) -> None:
    check_codec(parse(text))


@pytest.mark.parametrize("text", EVERY)
def test_the_text_names_the_codec(text: str) -> None:
    assert parse(text).text == text
    assert parse(parse(text).text) == parse(text)


@pytest.mark.parametrize("text", EVERY)
def test_10_000_mutants(text: str) -> None:
    random = torch.Generator().manual_seed(0)
    tree = {"w": torch.randn(9, 33, generator=random) ** 3, "mask": torch.rand(11, generator=random) < 0.5}
    report = fuzz(parse(text), tree, mutants=10_000)
    assert report.slowest_seconds < 5
    assert report.refused > 1000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, min_value=-(2.0**90), max_value=2.0**90), max_size=40), st.sampled_from(EVERY))
def test_any_values(values: list[float], text: str) -> None:
    tree = {"w": torch.tensor(values, dtype=torch.float32)}
    decoded = _there_and_back(parse(text), tree)
    assert spec_of(decoded) == spec_of(tree)
    assert bool(decoded["w"].isfinite().all())


@pytest.mark.parametrize("text", EVERY)
def test_huge_values_are_kept_or_refused_but_never_become_infinite(text: str) -> None:
    tree = {"w": torch.cat([torch.full((3,), 3.4e38), torch.full((1000,), -3.4e38)])}
    if text.split(":")[0] in UNBOUNDED and "|" not in text.replace("| float16", ""):
        assert bool(_there_and_back(parse(text), tree)["w"].isfinite().all())
    elif "unit" in text or "_mv" in text:
        assert _there_and_back(parse(text), tree)["w"].sign().unique().tolist() == [-1, 1]
    else:
        with pytest.raises(PayloadError, match="diverged"):
            _there_and_back(parse(text), tree)


@pytest.mark.parametrize("text", EVERY)
def test_the_smallest_values_do_no_harm(text: str) -> None:
    tree = {"w": torch.full((1100,), 1e-45)}
    assert float(_there_and_back(parse(text), tree)["w"].abs().max()) <= 1.0


_PRINT_HASHES = """
import hashlib, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from laconic.codecs import parse
from laconic.core import Key, Shared, spec_of, tree_sha256
tree = {"w": torch.randn(250, 280, generator=torch.Generator().manual_seed(0))}
shared = Shared(Key.from_seed(1))
for text in sys.argv[2:]:
    blob, _ = parse(text).encode(tree, shared, {})
    print(hashlib.sha256(blob).hexdigest(), tree_sha256(parse(text).decode(blob, spec_of(tree), shared)))
"""


def test_bytes_and_values_do_not_depend_on_the_number_of_threads() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_HASHES, threads, *EVERY],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads},
        ).stdout
        for threads in ("1", "3")
    }
    assert len(printed) == 1


def test_memory_is_bounded_by_the_model_not_by_the_payload() -> None:
    """Hand-made bombs: counts and lengths as large as they can be written."""
    spec = spec_of({"w": torch.zeros(2000)})
    huge = b"\xff" * 8 + b"\x7f"
    for text in EVERY:
        for bomb in (huge, b"\x00\x00\x80\x3f" + huge, b"\x00\x00\x80\x3f\x02" + huge, b"\x02" + huge, b"\x01" + huge):
            with pytest.raises(PayloadError):
                parse(text).decode(bomb, spec, SHARED)


def _there_and_back(codec: Codec, tree: Tree) -> Tree:
    blob, _ = codec.encode(tree, SHARED, codec.init_state(spec_of(tree)))
    return codec.decode(blob, spec_of(tree), SHARED)


@pytest.mark.parametrize("text", ["float32", "drive", "eden:bits=2", "topk:fraction=0.2 | int8"])
def test_ragged_leaves_have_the_length_that_exact_leaves_say(text: str) -> None:
    mask = torch.arange(500) % 3 == 0
    tree = {"kept": torch.randn(int(mask.sum())), "mask": mask, "free": torch.randn(4, 5)}
    spec = {
        "kept": Leaf((500,), length=lambda exact: int(exact["mask"].sum())),
        "mask": Leaf((500,), torch.bool),
        "free": Leaf((4, 5)),
    }
    codec, shared = parse(text), Shared(Key.from_seed(1))
    blob, _ = codec.encode(tree, shared, {})
    decoded = codec.decode(blob, spec, shared)
    assert list(decoded) == ["kept", "mask", "free"]
    assert torch.equal(decoded["mask"], mask)
    assert decoded["kept"].shape == tree["kept"].shape
    same = codec.decode(blob, spec_of(tree), shared)
    assert all(torch.equal(decoded[name], same[name]) for name in tree)


def test_a_ragged_leaf_cannot_be_longer_than_the_spec_allows() -> None:
    codec, shared = parse("float32"), Shared(Key.from_seed(1))
    blob, _ = codec.encode({"kept": torch.ones(8), "mask": torch.ones(8, dtype=torch.bool)}, shared, {})
    spec = {
        "kept": Leaf((4,), length=lambda exact: int(exact["mask"].sum())),
        "mask": Leaf((8,), torch.bool),
    }
    with pytest.raises(PayloadError, match="length"):
        codec.decode(blob, spec, shared)


def test_error_feedback_is_refused_for_ragged_messages() -> None:
    spec = {"kept": Leaf((4,), length=len), "mask": Leaf((8,), torch.bool)}
    with pytest.raises(ConfigError, match="varies"):
        parse("ef(drive)").init_state(spec)
