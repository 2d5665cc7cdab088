from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import laconic.codecs as lc
from laconic.codecs import (
    CodecId,
    Entropy,
    Floats,
    Pipeline,
    Read,
    Sink,
    Source,
    Write,
    check_codec,
    codecs,
    drive,
    eden,
    ef,
    parse,
    qsgd,
    signsgd,
    topk,
)
from laconic.core import Codec, ConfigError, Key, PayloadError


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (eden(2), "eden:bits=2"),
        (eden(bits=0.5), "eden:bits=0.5"),
        (eden(1, per_leaf=True), "eden:bits=1,per_leaf=true"),
        (qsgd(4), "qsgd:levels=4"),
        (signsgd(scale="mean"), "signsgd"),
        (signsgd(scale="unit"), "signsgd:scale=unit"),
        (topk(0.01) | eden(4), "topk:fraction=0.01 | eden:bits=4"),
        (ef(signsgd()), "ef(signsgd)"),
        (ef(topk(0.01) | signsgd()), "ef(topk:fraction=0.01 | signsgd)"),
    ],
)
def test_python_and_text_make_the_same_codec(made: Codec, text: str) -> None:
    assert made.text == text
    assert parse(text) == made


def test_a_list_is_a_chain() -> None:
    assert parse(["topk:fraction=0.01", "int8"]) == parse(" topk : fraction = 0.01|int8 ")
    assert parse(["eden:bits=1"]) == eden(1)


def test_ids() -> None:
    assert eden(1).id == CodecId.EDEN
    assert (topk(0.1) | eden(1)).id == CodecId.CHAIN
    assert ef(drive()).id == CodecId.DRIVE
    assert len(set(CodecId)) == len(CodecId)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("edne:bits=1", "did you mean 'eden'"),
        ("eden:bit=1", "did you mean 'bits'"),
        ("eden", "'bits' is required"),
        ("eden:bits=many", "valid number"),
        ("qsgd:levels=2.5", "levels"),
        ("signsgd:scale=max", "'mean' or 'unit'"),
        ("eden:bits", "key=value"),
        ("eden:bits=", "key=value"),
        ("eden:bits=1,bits=2", "twice"),
        ("", "unknown codec ''"),
        ([], "unknown codec ''"),
        ("topk:fraction=0.1 |", "unknown codec ''"),
        ("signsgd | eden:bits=1", "nothing can follow"),
        ("float16 | eden:bits=1", "nothing can follow"),
        ("topk:fraction=0.1 | ef(signsgd)", "wraps a whole codec"),
        ("ef(topk:fraction=0.1) | signsgd", "wraps a whole codec"),
        ("ef(ef(signsgd))", "one error feedback"),
        ("ef(signsgd", "parentheses"),
        ("ef signsgd)", "parentheses"),
    ],
)
def test_mistakes_get_one_clear_sentence(text: str | list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_entry_is_documented_and_exported() -> None:
    for name, line, _ in codecs.lines():
        assert line, name
        assert getattr(lc, name) is codecs[name]
        assert name in lc.__all__
    assert sorted(set(lc.__all__)) == sorted(lc.__all__)
    assert all(hasattr(lc, name) for name in lc.__all__)


def test_a_chain_is_per_leaf_if_any_part_of_it_is() -> None:
    assert (topk(0.1, per_leaf=True) | eden(1)).per_leaf
    assert (topk(0.1) | eden(1, per_leaf=True)).per_leaf
    assert not (topk(0.1) | eden(1)).per_leaf


@dataclass(frozen=True)
class Halve:
    """Every second value, the others come back as zero: a user's own stage."""

    quantizes: ClassVar[bool] = False

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        rest(values[::2])

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        values = torch.zeros(size)
        values[::2] = rest((size + 1) // 2)
        return values


@dataclass(frozen=True)
class Bytewise:
    """A byte a symbol: a user's own coder."""

    def encode(self, values: Tensor, alphabet: int, sink: Sink) -> None:
        sink.write(values.numpy().tobytes())

    def decode(self, source: Source, size: int, alphabet: int) -> Tensor:
        symbols = torch.from_numpy(source.array(size).copy())
        if int(symbols.max()) >= alphabet:
            raise PayloadError("symbol", "a symbol outside the alphabet")
        return symbols


def test_a_users_own_stage_and_coder_plug_in() -> None:
    halve = Pipeline((Halve(),), Floats("float16"), text="halve", id=CodecId.CUSTOM)
    check_codec(halve)
    check_codec(halve | eden(2))
    check_codec(Pipeline(signsgd().stages, Bytewise(), text="bytes", id=CodecId.CUSTOM + 1))


@dataclass(frozen=True)
class Careless(Halve):
    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        return torch.from_numpy(source.array(4).copy()).view(torch.float32).expand(size)


def test_check_codec_finds_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match=r"refuses its own"):
        check_codec(Pipeline((Careless(),), Floats(), text="careless", id=CodecId.CUSTOM))


def test_stages_after_a_quantizer_are_refused() -> None:
    stages = signsgd().stages + topk(0.1).stages
    with pytest.raises(ConfigError, match="nothing can follow"):
        Pipeline(stages, Entropy(), text="wrong", id=CodecId.CUSTOM)
