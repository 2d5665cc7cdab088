"""A codec of one's own, named in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.codecs import CodecId, Pipeline, check_codec, ef, parse
from laconic.config import experiment_from, read_tables
from laconic.core import ConfigError, Traits, traits_of

MODULE = """
from dataclasses import dataclass

import torch
from laconic.codecs import CodecId, Floats, Pipeline, ef, float32, signsgd, topk
from laconic.core import Traits


@dataclass(frozen=True)
class Every:
    keep: int
    quantizes = False

    def encode(self, values, key, sink, rest):
        rest(values[:: self.keep])

    def decode(self, source, size, key, rest):
        values = torch.zeros(size)
        values[:: self.keep] = rest(-(-size // self.keep))
        return values


def every(*, keep: int = 2):
    return Pipeline((Every(keep),), Floats(), text="every", id=CodecId.CUSTOM + 5)


def loosely(keep=2):
    return every(keep=keep)


def known(fraction: float):
    return topk(fraction)


@dataclass(frozen=True)
class Whole:
    width: int = 4
    text = "whole"
    id = 7
    traits = Traits(exact=True, unbiased=True)

    def init_state(self, spec):
        return {}

    def encode(self, tree, shared, state):
        return float32().encode(tree, shared, state)

    def decode(self, blob, spec, shared):
        return float32().decode(blob, spec, shared)


def number():
    return 3


def raises():
    raise RuntimeError("two\\nlines")


def positional(keep, /):
    return every(keep=keep)


def remembers():
    return ef(signsgd())


made = every()
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_codecs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("own_codecs:every", "own_codecs:every"),
        ("own_codecs:every:keep=3", "own_codecs:every:keep=3"),
        (" own_codecs : every : keep = 2 ", "own_codecs:every"),
        ("own_codecs:loosely:keep=3", "own_codecs:loosely:keep=3"),
        ("own_codecs:known:fraction=0.5", "own_codecs:known:fraction=0.5"),
        ("own_codecs:Whole:width=8", "own_codecs:Whole:width=8"),
        ("own_codecs:every:keep=3 | eden:bits=2", "own_codecs:every:keep=3 | eden:bits=2"),
        ("topk:fraction=0.5|own_codecs:every", "topk:fraction=0.5 | own_codecs:every"),
        ("ef(own_codecs:every)", "ef(own_codecs:every)"),
        ("ef(own_codecs:Whole)", "ef(own_codecs:Whole)"),
        (
            "by_leaf(w*: own_codecs:every:keep=3 | int8, *: own_codecs:Whole:width=5)",
            "by_leaf(w*: own_codecs:every:keep=3 | int8, *: own_codecs:Whole:width=5)",
        ),
    ],
)
def test_its_text_is_its_name(text: str, canonical: str) -> None:
    codec = parse(text)
    assert codec.text == canonical
    assert parse(canonical) == codec
    check_codec(codec)


def test_its_number_is_one_of_users_own() -> None:
    assert parse("own_codecs:every").id == CodecId.CUSTOM + 5
    assert parse("own_codecs:known:fraction=0.1").id == CodecId.CUSTOM
    assert parse("own_codecs:Whole").id == CodecId.CUSTOM
    assert parse("ef(own_codecs:every)").id == CodecId.CUSTOM + 5


def test_what_it_declares_counts() -> None:
    assert traits_of(parse("own_codecs:Whole")) == Traits(exact=True, unbiased=True)
    assert traits_of(parse("own_codecs:every")) == Traits()


def test_a_pipeline_stays_one() -> None:
    assert isinstance(parse("own_codecs:every"), Pipeline)
    assert parse("ef(own_codecs:every)") == ef(parse("own_codecs:every"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("own_codecs:number", "must give a codec (text, id, init_state, encode and decode), got int"),
        ("own_codecs:raises", "failed with RuntimeError (two lines)"),
        ("own_codecs:positional", "failed with TypeError"),
        ("own_codecs:positional:keep=2", "unknown key 'keep'"),
        ("own_codecs:remembers", "write ef(own_codecs:remembers)"),
        ("own_codecs:made", "can be called, got Pipeline"),
        ("own_codecs:evry", "did you mean 'every'"),
        ("own_codecs_elsewhere:every", "cannot import 'own_codecs_elsewhere'"),
        ("own_codecs:every:kep=2", "did you mean 'keep'"),
        ("own_codecs:every:keep=two", "valid integer"),
        ("own_codecs:every:keep", "key=value"),
        ("own_codecs:every:keep=2,keep=3", "twice"),
        ("own_codecs:known", "'fraction' is required"),
        ("own_codecs:known:fraction=2", "at most 1"),
        ("own_codecs:Whole | int8", "'own_codecs:Whole' gives no Pipeline"),
    ],
)
def test_mistakes_get_one_clear_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_in_a_configuration(tmp_path: Path) -> None:
    up, down = "ef(own_codecs:every:keep=3 | int8)", "by_leaf(*bias: own_codecs:Whole, *: own_codecs:every)"
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nrounds = 2\ncohort = 2\n[data]\nclients = 4\n[link]\nup = "{up}"\ndown = "{down}"\n')
    ((_, table),) = read_tables(path)
    experiment = experiment_from(table)
    assert experiment.config["link"] == {"up": up, "down": down, "down_memory": "auto", "memory": "1 GiB"}
    link = experiment.simulation.agreement.link
    assert (link.up.text, link.down.text) == (up, down)
    assert all(record["replies"] == 2 for record in experiment.simulation)
