from __future__ import annotations

import hashlib
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import Key, isolated

ROOT = Key.from_seed(0)
CLIENT = ROOT.fold_in("client", 3)
PARTS = st.lists(st.one_of(st.integers(), st.text()), max_size=4)


# --- golden values: whoever changes one of them changes every run that was ever made --------------------------------


def test_golden_digests() -> None:
    assert ROOT.digest.hex() == "79a6ee499b5094d1857fb23cd441d150"
    assert CLIENT.digest.hex() == "b7660207182dff0d74fb99aed131253f"
    assert Key.from_seed(2**40).digest.hex() == "c46b05e1787dccdb923ba0886ce70e63"
    assert Key.from_seed(-1).digest.hex() == "e81028701f62673e91bfef2a9aa5fd2d"
    assert ROOT.fold_in("größe").digest.hex() == "a156da5ff9f99e0ea85c0fa19940d496"


def test_golden_seeds() -> None:
    assert ROOT.seed() == 15101784078370645625
    assert CLIENT.seed() == 1008574422774343351 == int.from_bytes(CLIENT.digest[:8], "little")


def test_golden_philox_words() -> None:
    words = [7697967967699521162, 5910206397085492550, 7902443894138388322, 13315215644090995860]
    assert CLIENT.numpy().bit_generator.random_raw(4).tolist() == words


def test_golden_draws() -> None:
    # The kinds of draws that decide a run: a change of numpy's algorithms must not pass unnoticed.
    rng = CLIENT.numpy()
    assert rng.random(3).tolist() == [0.4173076797151821, 0.32039293077789077, 0.4283923418984824]
    assert rng.permutation(8).tolist() == [0, 2, 5, 1, 3, 6, 7, 4]
    assert rng.choice(100, 5, replace=False, shuffle=False).tolist() == [87, 73, 55, 23, 22]
    assert rng.integers(10, size=5).tolist() == [3, 1, 8, 2, 6]


def test_golden_torch_draws() -> None:
    drawn = [0.7985700964927673, 0.35047078132629395, 0.9586161375045776]
    assert torch.rand(3, generator=CLIENT.torch()).tolist() == drawn
    with isolated(CLIENT):
        assert torch.rand(3).tolist() == drawn


def test_a_digest_is_the_written_formula() -> None:
    digest = bytes(16)
    for part in (b"slaconic", b"i7", b"sround", b"i-2"):
        digest = hashlib.blake2b(digest + part, digest_size=16, person=b"laconic.key").digest()
    assert Key.from_seed(7).fold_in("round", -2) == Key(digest)


# --- paths ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(PARTS, PARTS)
def test_folding_is_associative(one: list[int | str], two: list[int | str]) -> None:
    assert ROOT.fold_in(*one, *two) == ROOT.fold_in(*one).fold_in(*two)


@settings(deadline=None, derandomize=True)
@given(PARTS, PARTS)
def test_different_paths_are_different_keys(one: list[int | str], two: list[int | str]) -> None:
    assert (ROOT.fold_in(*one) == ROOT.fold_in(*two)) == (one == two)


def test_the_order_of_a_path_matters_and_so_does_the_kind_of_its_parts() -> None:
    paths = [("a", "b"), ("b", "a"), ("ab",), ("a", 1), ("a1",), ("a", "1"), (1, "a"), (), ("",), (0,), ("0",)]
    assert len({ROOT.fold_in(*path) for path in paths}) == len(paths)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(kind: type[np.integer]) -> None:
    assert ROOT.fold_in(kind(3)) == ROOT.fold_in(3) != ROOT.fold_in("3")
    assert Key.from_seed(kind(3)) == Key.from_seed(3)


@pytest.mark.parametrize("part", [0.5, None, b"x"])
def test_other_parts_are_refused(part: object) -> None:
    with pytest.raises(TypeError):
        ROOT.fold_in(part)  # type: ignore[arg-type]


def test_streams_do_not_depend_on_when_they_are_drawn() -> None:
    keys = {name: ROOT.fold_in(name) for name in ("a", "b", "c")}
    forward = {name: keys[name].numpy().random(4).tolist() for name in "abc"}
    backward = {name: keys[name].numpy().random(4).tolist() for name in "cba"}
    assert forward == backward
    assert len({tuple(draw) for draw in forward.values()}) == 3
    # A generator is new every time: whoever draws more takes nothing away from others.
    keys["a"].numpy().random(1000)
    assert keys["a"].numpy().random(4).tolist() == forward["a"]


def test_neighbouring_keys_are_uncorrelated() -> None:
    rows = np.stack([ROOT.fold_in("client", i).numpy().standard_normal(2000) for i in range(20)])
    apart = np.corrcoef(rows)[~np.eye(20, dtype=bool)]
    assert np.abs(apart).max() < 5 / np.sqrt(2000)  # five standard deviations


# --- isolation ------------------------------------------------------------------------------------------------------


def test_isolated_leaves_the_global_generator_as_it_was() -> None:
    before = torch.random.get_rng_state()
    with isolated(ROOT):
        torch.rand(10)
        with isolated(CLIENT):
            torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_isolated_leaves_it_so_after_an_error() -> None:
    def fails() -> None:
        with isolated(ROOT):
            torch.rand(10)
            raise ZeroDivisionError

    before = torch.random.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_isolated_code_is_a_function_of_the_key() -> None:
    drawn = []
    for outside in (1, 2):
        with isolated(Key.from_seed(outside)), isolated(CLIENT):
            drawn.append(torch.rand(5))
    assert torch.equal(*drawn)
    with isolated(ROOT):
        assert not torch.equal(torch.rand(5), drawn[0])


def test_nested_isolation_does_not_disturb_the_outer_stream() -> None:
    with isolated(ROOT):
        whole = torch.rand(6)
    with isolated(ROOT):
        first = torch.rand(3)
        with isolated(CLIENT):
            torch.rand(100)
        rest = torch.rand(3)
    assert torch.equal(torch.cat([first, rest]), whole)


def test_keys_touch_no_global_generator() -> None:
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    CLIENT.numpy().random(5)
    torch.rand(5, generator=CLIENT.torch())
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert random.getstate() == states[2]


def test_a_key_is_a_value() -> None:
    again = Key.from_seed(0)
    assert again == ROOT
    assert hash(again) == hash(ROOT)
    with pytest.raises(AttributeError):
        again.digest = b""  # type: ignore[misc]
    found: list[Key] = []
    thread = threading.Thread(target=lambda: found.append(Key.from_seed(0).fold_in("client", 3)))
    thread.start()
    thread.join()
    assert found == [CLIENT]
