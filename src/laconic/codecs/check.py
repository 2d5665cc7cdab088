"""The laws that every codec obeys, one's own included: `check_codec` examines them, `fuzz` attacks the decoder."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.wire import Direction, Header, seal, unseal
from laconic.core import Codec, Key, PayloadError, Shared, Spec, Tree, spec_of, traits_of, tree_sha256

_SPECIAL = [np.float32(v).tobytes() for v in (math.nan, math.inf, -math.inf, 1e-45, -0.0, 3e38, -1.0)]
_SPECIAL += [b"\xff" * 10, b"\x80" * 10 + b"\x01", b"\xff" * 4, bytes(4), (2**63).to_bytes(8, "little")]


def check_codec(codec: Codec, *, tree: Tree | None = None, seed: int = 0, mutants: int = 200) -> None:
    """Raise `AssertionError` with the law that a codec breaks, if it breaks one.

    1. What is decoded has the names, shapes and types of the spec, and finite values; leaves that are not
       floating-point come back exactly, and all of them where the codec's traits say so. A tree of zeros comes back
       as zeros.
    2. Same tree, same key, same state: same bytes and same new state; same bytes, same tree.
    3. Inputs are not changed. `init_state` names what `encode` returns as state.
    4. NaN and infinite values are refused with `PayloadError`.
    5. Every prefix of a payload, every frame that is cut, and every payload with a byte more is refused with
       `PayloadError`; altered payloads raise `PayloadError` or decode to a proper tree, and raise nothing else.

    >>> from laconic.codecs import eden, topk
    >>> check_codec(topk(0.1) | eden(2.5))
    """
    key = Key.from_seed(seed)
    for name, example in _examples(key).items() if tree is None else [("the given tree", tree)]:
        _check_round_trip(codec, example, _known(codec, example, key.fold_in(name)), name)
        _check_refusals(codec, example, _known(codec, example, key.fold_in(name)), name)
    example = _examples(key)["mixed"] if tree is None else tree
    fuzz(codec, example, mutants=mutants, seed=seed)


class FuzzReport(NamedTuple):
    """What became of the mutants."""

    refused: int
    decoded: int
    slowest_seconds: float


def fuzz(codec: Codec, tree: Tree, *, mutants: int, seed: int = 0) -> FuzzReport:
    """Decode altered payloads; `AssertionError` if anything but `PayloadError` or a proper tree comes out."""
    shared, spec = _known(codec, tree, Key.from_seed(seed)), spec_of(tree)
    blob, _ = codec.encode(tree, shared, codec.init_state(spec))
    refused, slowest = 0, 0.0
    for mutant in mutated(blob, mutants, np.random.default_rng(seed)):
        began = time.perf_counter()
        try:
            decoded = codec.decode(mutant, spec, shared)
        except PayloadError:
            refused += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise AssertionError(f"{codec.text}: {error!r} on the payload {mutant.hex()}") from error
        else:
            _check_proper(decoded, spec, f"{codec.text}: on the payload {mutant.hex()}")
        slowest = max(slowest, time.perf_counter() - began)
    return FuzzReport(refused, mutants - refused, slowest)


def mutated(blob: bytes, count: int, random: np.random.Generator) -> Iterator[bytes]:
    """Payloads that differ from an honest one in the ways that break decoders."""
    for _ in range(count):
        mutant = bytearray(blob)
        for _ in range(1 + int(random.integers(3)) ** 2):
            # Side information stands at the beginning of what it belongs to: look there more often than elsewhere.
            reach = len(mutant) if random.random() < 0.5 else min(len(mutant), 24)
            at, size = int(random.integers(reach + 1)), int(random.integers(1, 9))
            kind = int(random.integers(8))
            if kind == 0 and at < len(mutant):
                mutant[at] ^= 1 << int(random.integers(8))
            elif kind == 1 and at < len(mutant):
                mutant[at] = int(random.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF]))
            elif kind == 2:
                special = _SPECIAL[int(random.integers(len(_SPECIAL)))]
                mutant[at : at + len(special)] = special
            elif kind == 3:
                mutant[at : at + size] = random.bytes(size)
            elif kind == 4:
                del mutant[at : at + size]
            elif kind == 5:
                mutant[at:at] = random.bytes(size)
            elif kind == 6:
                mutant[at : at + 4 * size] = bytes(4 * size)
            else:
                mutant = mutant[:at] if random.random() < 0.5 else mutant + mutant[at : at + size]
        yield bytes(mutant)


def _known(codec: Codec, tree: Tree, key: Key) -> Shared:
    """What both ends know of a message; to a codec that draws, its bits are probabilities of 0 and 1."""
    bits = (name for name, leaf in tree.items() if leaf.dtype == torch.bool)
    return Shared(key, bernoulli=frozenset(bits) if traits_of(codec).draws else frozenset())


def _examples(key: Key) -> dict[str, Tree]:
    random = key.fold_in("examples").torch()
    return {
        "mixed": {
            "weight": torch.randn(40, 30, generator=random),
            "mask": torch.rand(21, generator=random) < 0.3,
            "bias": torch.randn(7, generator=random, dtype=torch.float64),
            "count": torch.tensor([[3, -1]], dtype=torch.int32),
            "empty": torch.zeros(0, 3),
        },
        "one value": {"weight": torch.tensor([-0.7])},
        "constant": {"weight": torch.full((50,), 0.25)},
        "zeros": {"weight": torch.zeros(1030), "bias": torch.zeros(3)},
        "outlier": {"weight": torch.cat([torch.full((1,), 1e20), torch.randn(99, generator=random)])},
        "no float": {"mask": torch.ones(3, dtype=torch.bool)},
        "nothing": {},
    }


def _check_round_trip(codec: Codec, tree: Tree, shared: Shared, name: str) -> None:
    where, spec = f"{codec.text}: {name}", spec_of(tree)
    state = codec.init_state(spec)
    before = tree_sha256(tree), tree_sha256(state)
    blob, after = codec.encode(tree, shared, state)
    again, after_again = codec.encode(tree, shared, state)
    _law((tree_sha256(tree), tree_sha256(state)) == before, f"{where}: encode changed its inputs")
    _law(blob == again, f"{where}: the same tree, key and state gave other bytes")
    _law(tree_sha256(after) == tree_sha256(after_again), f"{where}: the same tree, key and state gave another state")
    _law(spec_of(after) == spec_of(state), f"{where}: the new state is not made like the first one")
    try:
        decoded, decoded_again = codec.decode(blob, spec, shared), codec.decode(blob, spec, shared)
    except PayloadError as error:
        raise AssertionError(f"{where}: it refuses its own payload: {error}") from error
    _check_proper(decoded, spec, where)
    _law(tree_sha256(decoded_again) == tree_sha256(decoded), f"{where}: the same bytes gave another tree")
    for leaf in spec:
        if leaf in shared.bernoulli:  # which bits come is the codec's own affair
            continue
        exact = not spec[leaf].dtype.is_floating_point or (traits_of(codec).exact and spec[leaf].dtype == torch.float32)
        _law(not exact or torch.equal(decoded[leaf], tree[leaf]), f"{where}: {leaf!r} must come back exactly")
    if not any(bool(leaf.any()) for leaf in tree.values()):
        something = any(bool(leaf.any()) for leaf_name, leaf in decoded.items() if leaf_name not in shared.bernoulli)
        _law(not something, f"{where}: zeros come back as something")


def _check_refusals(codec: Codec, tree: Tree, shared: Shared, name: str) -> None:
    where, spec = f"{codec.text}: {name}", spec_of(tree)
    state = codec.init_state(spec)
    blob, _ = codec.encode(tree, shared, state)
    header = Header(direction=Direction.UP, codec=codec.id, round=1, client=2, fingerprint=bytes(8), weight=1)
    frame = seal(header, blob)
    for length in range(len(frame)):
        with _refused(f"{where}: a frame of {length} of {len(frame)} bytes"):
            unseal(frame[:length], direction=Direction.UP, codec=codec.id, round=1, client=2, fingerprint=bytes(8))
    for wrong in (*(blob[:length] for length in range(len(blob))), blob + b"\0"):
        with _refused(f"{where}: a payload of {len(wrong)} instead of {len(blob)} bytes"):
            codec.decode(wrong, spec, shared)
    for leaf in (leaf for leaf in tree if tree[leaf].is_floating_point() and tree[leaf].numel()):
        for value in (math.nan, math.inf, -math.inf):
            bad = {**tree, leaf: tree[leaf].clone()}
            bad[leaf].view(-1)[-1] = value
            with _refused(f"{where}: {value} in {leaf!r}"):
                codec.encode(bad, shared, state)


def _check_proper(decoded: Mapping[str, Tensor], spec: Spec, where: str) -> None:
    _law(list(decoded) == list(spec), f"{where}: leaves {list(decoded)}, but the spec has {list(spec)}")
    for name, leaf in spec_of(decoded).items():
        _law(leaf == spec[name], f"{where}: {name!r} is {leaf}, but the spec has {spec[name]}")
        _law(bool(decoded[name].isfinite().all()), f"{where}: {name!r} holds NaN or infinite values")


def _law(obeyed: bool, otherwise: str) -> None:
    if not obeyed:
        raise AssertionError(otherwise)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except PayloadError:
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {error!r}, not PayloadError") from error
    raise AssertionError(f"{what} is accepted")
