"""`model.lac`: a model in few bytes. docs/model-file.md is its normative text.

A file holds the architecture as words, and of the model's compact form (`Artifact`) what the architecture does not say:
bits and values, entropy coded. All sizes come from the architecture, never from the file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from laconic.codecs.dense import Floats
from laconic.codecs.entropy import read_symbols, write_symbols
from laconic.codecs.stream import Sink, Source
from laconic.core import (
    Artifact,
    ConfigError,
    DataError,
    PayloadError,
    Spec,
    Tree,
    cut,
    describe,
    num_values,
    read_state,
    spec_of,
)
from laconic.models import assemble, models
from laconic.models.assemble import KINDS, bit_spec, value_spec

MAGIC = b"LACM"
VERSION = 1
Values = Literal["float32", "float16", "int8"]
MAX_PARAMETERS = 1_000_000_000
"""The largest model that a file may ask for, unless the reader allows more."""
_ANY, _PER_BYTE = 1 << 20, 4096  # parameters that a file of any size, and that every byte of it, may ask for

_FIELDS = struct.Struct("<4sB3xIQ8s")
_DIGEST_BYTES = 16
_MAX_HEADER = 1 << 16
_MAX_SIDE = 1 << 24
_STEPS = 127  # int8 values are multiples of 1/127 of the leaf's largest


@dataclass(frozen=True)
class ModelFile:
    """What a file says: the architecture in words, and the model's compact form."""

    architecture: Mapping[str, Any]
    artifact: Artifact
    values: Values
    num_bytes: int
    parameters: int
    digest: str
    build: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        """The model, ready to predict."""
        return assemble(self.build, self.artifact)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.architecture["shape"])

    @property
    def bits_per_parameter(self) -> float:
        """Of the whole file, per parameter of the whole architecture."""
        return 8 * self.num_bytes / max(1, self.parameters)


def write_model(
    artifact: Artifact, architecture: Mapping[str, Any], spec: Spec, *, values: Values = "float32"
) -> bytes:
    """The file of a model.

    `architecture` is `shape` and `outputs`, and a `name` and `settings` where it has them; `spec` is the state of the
    whole model, by which a reader knows that it has made the same one.
    """
    if values not in get_args(Values):
        raise ConfigError(f"values of a model file are {', '.join(get_args(Values))}, got {values!r}.")
    header: dict[str, Any] = {"kind": artifact.kind, "model": dict(architecture)}
    if artifact.settings:
        header["settings"] = dict(artifact.settings)
    if values != "float32":
        header["values"] = values
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    payload = _payload(artifact, values)
    fields = _FIELDS.pack(MAGIC, VERSION, len(text), len(payload), _fingerprint(spec))
    return b"".join((fields, _digest(fields, text, payload), text, payload))


def read_model(
    blob: bytes, model: Callable[[], nn.Module] | None = None, *, max_parameters: int | None = None
) -> ModelFile:
    """What a file holds; `PayloadError` if it is anything but whole and unaltered.

    `model` makes the architecture where the file does not name one of the catalogue's. Nothing is made that the file is
    too small to be about: `max_parameters` is then the caller's to give.
    """
    if max_parameters is None:
        max_parameters = MAX_PARAMETERS if model is not None else min(MAX_PARAMETERS, _ANY + _PER_BYTE * len(blob))
    text, payload, fingerprint, digest = _opened(blob)
    header = _header(text)
    architecture = header["model"]
    build = model if model is not None else _builder(architecture)
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build().parameters())
    except ConfigError as error:
        raise PayloadError("model", f"the file's model cannot be made: {error}") from None
    if parameters > max_parameters:
        raise PayloadError(
            "model", f"a model of {parameters:,} parameters, but {max_parameters:,} is the most for {len(blob)} bytes"
        )
    kind, settings, values = header["kind"], header.get("settings", {}), header.get("values", "float32")
    module = build()
    if _fingerprint(spec_of(read_state(module))) != fingerprint:
        raise PayloadError("model", "the saved model had other leaves than this architecture; is it the same one?")
    source = Source(payload)
    bits = _read_bits(source, _within(bit_spec(module, kind, settings), 2 * max_parameters))
    try:
        spec = _within(value_spec(module, kind, settings, bits), 2 * max_parameters)
    except ConfigError as error:
        raise PayloadError("units", f"the file's units make no model: {error}") from None
    tree = {**bits, **_read_values(source, spec, values)}
    source.finish()
    return ModelFile(architecture, Artifact(kind, tree, settings), values, len(blob), parameters, digest, build)


def open_model(path: Path | str, model: Callable[[], nn.Module] | nn.Module | None = None) -> ModelFile:
    """The model file at a path; `DataError` says what is wrong with it."""
    path = Path(path)
    build = (lambda: model) if isinstance(model, nn.Module) else model
    try:
        return read_model(path.read_bytes(), build)
    except OSError as error:
        raise DataError(f"cannot read {path}: {(error.strerror or str(error)).lower()}.") from None
    except PayloadError as error:
        raise DataError(f"{path} cannot be loaded: {error}.") from None


def load(path: Path | str, model: Callable[[], nn.Module] | nn.Module | None = None) -> nn.Module:
    """The model in a `model.lac`, ready to predict exactly as it did before it was saved.

    `model` (a module, or a function that makes one) is needed where the architecture is not one of the catalogue's:
    a file never makes us import code.
    """
    return open_model(path, model).model()


# --- the parts -------------------------------------------------------------------------------------------------------


def _opened(blob: bytes) -> tuple[bytes, bytes, bytes, str]:
    start = _FIELDS.size + _DIGEST_BYTES
    if len(blob) < start:
        raise PayloadError("truncated", f"{len(blob)} bytes, but a model file begins with {start}")
    fields, digest = blob[: _FIELDS.size], blob[_FIELDS.size : start]
    magic, version, header_bytes, payload_bytes, fingerprint = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise PayloadError("magic", f"a model file begins with {MAGIC!r}, this one with {magic!r}; is it a model.lac?")
    if version != VERSION:
        raise PayloadError("version", f"a model file of version {version}, but this laconic reads {VERSION}")
    if header_bytes > _MAX_HEADER:
        raise PayloadError("header", f"a header of {header_bytes} bytes, but {_MAX_HEADER} is the most")
    announced = start + header_bytes + payload_bytes
    if len(blob) != announced:
        word = "truncated" if len(blob) < announced else "trailing"
        raise PayloadError(word, f"{announced} bytes were announced, {len(blob)} are there")
    text, payload = blob[start : start + header_bytes], blob[start + header_bytes :]
    if digest != _digest(fields, text, payload):
        raise PayloadError("checksum", "the file was altered: its digest is not that of its contents")
    return text, payload, fingerprint, digest.hex()


def _within(spec: Spec, most: int) -> Spec:
    """The leaves, if they have no more values than that."""
    if num_values(spec) > most:
        raise PayloadError("model", f"{num_values(spec):,} values, but {most:,} is the most")
    return spec


def _fingerprint(spec: Spec) -> bytes:
    return hashlib.blake2b(describe(spec).encode(), digest_size=8).digest()


def _digest(fields: bytes, text: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=_DIGEST_BYTES)
    digest.update(text)
    digest.update(payload)
    return digest.digest()


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise PayloadError("header", "the header is no JSON") from None
    if not isinstance(header, dict) or header.keys() - {"kind", "settings", "model", "values"}:
        raise PayloadError("header", "the header must hold kind, settings, model and values, and nothing else")
    if header.get("kind") not in KINDS:
        known = ", ".join(KINDS)
        raise PayloadError("kind", f"a model of kind {header.get('kind')!r}; this version knows {known}")
    if header.get("values", "float32") not in get_args(Values):
        raise PayloadError(
            "values", f"values as {header['values']!r}; this version knows {', '.join(get_args(Values))}"
        )
    if not isinstance(header.get("settings", {}), dict):
        raise PayloadError("header", "settings must be a table")
    model = header.get("model")
    if not isinstance(model, dict) or model.keys() - {"name", "settings", "shape", "outputs"}:
        raise PayloadError("header", "model must hold name, settings, shape and outputs, and nothing else")
    shape = model.get("shape")
    sides = [*shape, model.get("outputs")] if isinstance(shape, list) else [None]
    if not all(type(side) is int and 0 < side <= _MAX_SIDE for side in sides):
        raise PayloadError("header", "a model's shape and outputs are positive whole numbers")
    if not isinstance(model.get("name", ""), str) or not isinstance(model.get("settings", {}), dict):
        raise PayloadError("header", "a model's name is a word, its settings are a table")
    return header


def _builder(architecture: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """How to make an architecture of the catalogue; nothing that a file names is imported."""
    name, settings = architecture.get("name"), architecture.get("settings", {})
    if name is None or ":" in name:
        what = "the user's own" if name is None else repr(name)
        raise PayloadError("model", f"the architecture is {what}; pass it: load(path, model=…)")
    given = (tuple(architecture["shape"]), architecture["outputs"])
    return lambda: models.build(name, settings, given=given)


def _payload(artifact: Artifact, values: Values) -> bytes:
    sink = Sink()
    bits = {name: leaf for name, leaf in artifact.tree.items() if leaf.dtype == torch.bool}
    if bits:
        write_symbols(sink, torch.cat([leaf.reshape(-1) for leaf in bits.values()]).view(torch.uint8), 2)
    leaves = [leaf.detach().cpu().reshape(-1).float() for name, leaf in artifact.tree.items() if name not in bits]
    if not leaves or not sum(map(len, leaves)):
        return sink.getvalue()
    vector = torch.cat(leaves)
    if not bool(vector.isfinite().all()):
        raise ConfigError("the model holds NaN or infinite values; there is nothing to save.")
    if values == "int8":
        steps = [_steps(leaf) for leaf in leaves]
        for scale, _ in steps:
            sink.write_scale(scale)
        vector = torch.cat([step for _, step in steps])
    kept = vector != 0
    write_symbols(sink, kept.view(torch.uint8), 2)
    if not bool(kept.any()):
        return sink.getvalue()
    if values == "int8":
        write_symbols(sink, (vector[kept] + _STEPS).to(torch.uint8), 2 * _STEPS + 1)
    else:
        Floats(values).encode(vector[kept], 0, sink)
    return sink.getvalue()


def _steps(leaf: Tensor) -> tuple[float, Tensor]:
    """The step of a leaf, and its values as whole numbers of steps, to nearest."""
    scale = float(np.float32(float(leaf.abs().max()) / _STEPS)) if len(leaf) else 0.0
    if scale < 2.0**-100:
        return 0.0, torch.zeros_like(leaf)
    return scale, (leaf / scale).round_().clamp_(-_STEPS, _STEPS)


def _read_bits(source: Source, spec: Spec) -> Tree:
    if not spec:
        return {}
    bits = read_symbols(source, num_values(spec), 2).view(torch.bool)
    return cut(bits, spec)


def _read_values(source: Source, spec: Spec, values: Values) -> Tree:
    size = num_values(spec)
    if not size:
        return {name: torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in spec.items()}
    scales = [source.read_scale() for _ in spec] if values == "int8" else []
    kept = read_symbols(source, size, 2).view(torch.bool)
    vector = torch.zeros(size)
    count = int(kept.sum())
    if count:
        vector[kept] = (
            read_symbols(source, count, 2 * _STEPS + 1).float() - _STEPS
            if values == "int8"
            else Floats(values).decode(source, count, 0)
        )
    if not bool(vector.isfinite().all()):
        raise PayloadError("non_finite", "the model would hold NaN or infinite values")
    tree = cut(vector, spec)
    if scales:
        tree = {name: leaf * scale for (name, leaf), scale in zip(tree.items(), scales, strict=True)}
    return {name: leaf.to(spec[name].dtype) for name, leaf in tree.items()}
