"""Codecs around a codec whose losses are sent later: error feedback for the way up, contraction for the way down."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.vector import floating
from laconic.core import Codec, ConfigError, PayloadError, Shared, Spec, Traits, Tree, exact_names, spec_of, traits_of

_CONTRACTS = 0.75  # the share of the energy that may be left without scaling


@runtime_checkable
class HasMemory(Protocol):
    """A codec that does otherwise where what it loses is sent later: a bias is made good there, noise never is."""

    def with_memory(self) -> Codec:
        """The codec for such a place. Its text and its bytes' meaning stay the same."""
        ...


def with_memory(codec: Codec) -> Codec:
    """The codec for a place where what it loses is sent later: inside `ef(…)`, and on the way down.

    >>> from laconic.codecs import lean
    >>> lean(bits=0.3).traits.unbiased, with_memory(lean(bits=0.3)).traits.unbiased
    (True, False)
    """
    return codec.with_memory() if isinstance(codec, HasMemory) else codec


@dataclass(frozen=True)
class ErrorFeedback:
    """A codec whose sender keeps the residual e between rounds (Seide et al., 2014; Karimireddy et al., 2019)::

        blob = encode(x + e)        e' = x + e − decode(blob)

    so that all that was decoded, and the residual, add up to all that was to be sent. The receiver needs nothing of
    it: on the wire it is the codec inside. The state is one residual per floating-point leaf.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError(f"ef({self.codec.text}): one error feedback is enough.")
        if traits_of(self.codec).draws:
            raise ConfigError(f"ef({self.codec.text}): bits that are drawn leave nothing to feed back.")
        object.__setattr__(self, "codec", with_memory(self.codec))

    @property
    def text(self) -> str:
        """The codec as it is written in a configuration."""
        return f"ef({self.codec.text})"

    @property
    def id(self) -> int:
        """The number of the codec inside."""
        return self.codec.id

    @property
    def traits(self) -> Traits:
        """Those of the codec inside, but for the residual of earlier rounds that a message carries as well."""
        inner = traits_of(self.codec)
        return replace(inner, unbiased=inner.exact)

    def init_state(self, spec: Spec) -> Tree:
        """No residual yet."""
        ragged = [name for name, leaf in spec.items() if leaf.length is not None]
        if ragged:
            raise ConfigError(
                f"{self.text}: error feedback needs messages of one shape, but the length of {ragged[0]!r} varies; "
                f"write {self.codec.text!r}."
            )
        self.codec.init_state(spec)  # what the codec inside cannot take is said now
        return {
            name: torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in floating(spec, exact_names(spec)).items()
        }

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The payload of the tree and what was lost before; the new state is what is lost now."""
        wanted = {name: leaf.detach() + state[name] if name in state else leaf.detach() for name, leaf in tree.items()}
        blob, _ = self.codec.encode(wanted, shared, {})
        spec = spec_of(wanted)
        decoded = self.codec.decode(blob, spec, shared)
        return blob, {name: wanted[name] - decoded[name] for name in floating(spec, shared.exact)}

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """What the codec inside decodes."""
        return self.codec.decode(blob, spec, shared)


@dataclass(frozen=True)
class Contraction:
    """A codec whose values are scaled where they would lead the receiver away, by a number that the sender sends::

        x̂ = a·decode(blob)        a = 1 where ‖x − decode(blob)‖² ≤ ¾‖x‖², else ⟨x, decode(blob)⟩ / ‖decode(blob)‖²

    It is for changes to what the receiver holds: ‖x − x̂‖ ≤ ‖x‖, whatever the codec, while the noise of an unbiased one
    would add up where it is larger than what is sent, at half a bit, say. Where it is smaller, it does less harm than
    the bias of least squares: clients do not lag behind, and noise evens out over a cohort. Leaves that pass exactly
    are left alone. The payload is `a` in float32, then that of the codec inside; only the latter, where no values are
    quantised.
    """

    codec: Codec

    @property
    def text(self) -> str:
        """That of the codec inside."""
        return self.codec.text

    @property
    def id(self) -> int:
        """The number of the codec inside."""
        return self.codec.id

    @property
    def traits(self) -> Traits:
        """Those of the codec inside, which is no longer unbiased."""
        return replace(traits_of(self.codec), unbiased=False)

    def init_state(self, spec: Spec) -> Tree:
        """That of the codec inside."""
        return self.codec.init_state(spec)

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The scale, and the payload."""
        return self.sent(tree, shared)[0], state

    def sent(self, tree: Tree, shared: Shared) -> tuple[bytes, Tree]:
        """The payload, and what it will be decoded to, which finding the scale takes anyway."""
        blob, _ = self.codec.encode(tree, shared, {})
        spec = spec_of(tree)
        decoded, names = self.codec.decode(blob, spec, shared), list(floating(spec, shared.exact))
        if not names:
            return blob, decoded
        scale = np.float32(_scale([(tree[name].detach(), decoded[name]) for name in names]))
        return scale.astype("<f4").tobytes() + blob, _scaled(decoded, names, float(scale))

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """What the codec inside decodes, scaled."""
        names = floating(spec, shared.exact)
        if not names:
            return self.codec.decode(blob, spec, shared)
        if len(blob) < 4:
            raise PayloadError("truncated", "a change without its scale")
        scale = float(np.frombuffer(blob[:4], "<f4")[0])
        if not math.isfinite(scale):
            raise PayloadError("non_finite", "the scale of a change is not finite")
        return _scaled(self.codec.decode(blob[4:], spec, shared), names, scale)


def _scale(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """1 where what was decoded comes close enough to what was sent, else the scale of least squares."""
    whole = sum(_energy(sent) for sent, _ in pairs)
    if sum(_energy(sent - found) for sent, found in pairs) <= _CONTRACTS * whole:
        return 1.0
    energy = sum(_energy(found) for _, found in pairs)
    along = sum(float(sent.double().flatten() @ found.double().flatten()) for sent, found in pairs)
    return along / energy if energy else 1.0


def _energy(leaf: Tensor) -> float:
    return float(torch.linalg.vector_norm(leaf, dtype=torch.float64)) ** 2


def _scaled(decoded: Tree, names: Collection[str], scale: float) -> Tree:
    if scale == 1:
        return decoded
    scaled = {name: leaf * scale if name in names else leaf for name, leaf in decoded.items()}
    if not all(bool(scaled[name].isfinite().all()) for name in names):
        raise PayloadError("non_finite", f"a change would not be finite at a scale of {scale:.3g}")
    return scaled


def ef(codec: Codec) -> Codec:
    """Error feedback around any codec, `ef(signsgd())`: what was lost is sent later.

    >>> from laconic.codecs import signsgd
    >>> from laconic.core import Key
    >>> tree, shared = {"w": torch.tensor([3.0, 1.0])}, Shared(Key.from_seed(0))
    >>> blob, residual = ef(signsgd()).encode(tree, shared, {})
    >>> residual["w"]
    tensor([ 1., -1.])
    """
    return ErrorFeedback(codec)
