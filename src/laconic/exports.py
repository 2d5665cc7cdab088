"""A run's final model for other programs: `laconic export RUN --format torch|onnx|lac`."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from laconic.core import ConfigError, DataError, read_state, spec_of
from laconic.engine.files import write_atomically
from laconic.model_file import ModelFile, Values, open_model, write_model
from laconic.models import multiply_adds, num_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Format = Literal["torch", "onnx", "lac"]
_SUFFIX = {"torch": ".pt2", "onnx": ".onnx", "lac": ".lac"}


@dataclass(frozen=True)
class Exported:
    """A file, and what it costs to store and to run beside the whole architecture in float32."""

    path: Path
    num_bytes: int
    whole_bytes: int
    parameters: int
    whole_parameters: int
    multiply_adds: int
    whole_multiply_adds: int


def export(
    source: Path | str,
    *,
    format: Format = "torch",
    out: Path | str | None = None,
    values: Values = "float32",
    model: Callable[[], nn.Module] | nn.Module | None = None,
) -> Exported:
    """Write the model of a run's folder (or of a `model.lac`) as a file of another format.

    `torch` is a program of `torch.export` (load it with `torch.export.load(path).module()`; it needs nothing of
    laconic), `onnx` an ONNX model, `lac` a model file with its values as `float32`, `float16` or `int8`. `model` is
    needed where the architecture is not one of the catalogue's, as in `load`.
    """
    if format not in get_args(Format):
        raise ConfigError(f"a model is exported as {', '.join(get_args(Format))}, got {format!r}.")
    if values != "float32" and format != "lac":
        raise ConfigError(f"values = {values!r} goes with format = 'lac' only.")
    source = Path(source)
    found = _found(source, model)
    made, whole = found.model(), found.build()
    example = torch.zeros(1, *found.shape)
    folder = source if source.is_dir() else source.parent
    name = "exported" if format == "lac" and out is None else "model"
    path = Path(out) if out is not None else folder / f"{name}{_SUFFIX[format]}"
    if format == "lac":
        data = write_model(found.artifact, found.architecture, spec_of(read_state(whole)), values=values)
    else:
        data = _torch(made, example) if format == "torch" else _onnx(made, example)
    write_atomically(path, data)
    return Exported(
        path,
        path.stat().st_size,
        4 * num_parameters(whole),
        num_parameters(made),
        num_parameters(whole),
        multiply_adds(made, example),
        multiply_adds(whole, example),
    )


def _found(source: Path, model: Callable[[], nn.Module] | nn.Module | None) -> ModelFile:
    if not source.is_dir():
        return open_model(source, model)
    file = source / "model.lac"
    if not file.exists():
        run = (source / "config.toml").exists()
        what = "the run has not ended, or its method has no such file" if run else "this is no run's folder"
        raise DataError(f"there is no {file}: {what}.")
    return open_model(file, model)


def _torch(model: nn.Module, example: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_program(model, example), buffer)
    return buffer.getvalue()


def _onnx(model: nn.Module, example: Tensor) -> bytes:
    for needed in ("onnx", "onnxscript"):
        try:
            importlib.import_module(needed)
        except ImportError:
            raise ConfigError(f"ONNX needs {needed}: pip install 'laconic[onnx]'.") from None
    with _quiet():
        program = torch.onnx.export(_program(model, example), dynamo=True, verbose=False)
    assert program is not None  # noqa: S101 - for the type checker: no file was asked for
    return bytes(program.model_proto.SerializeToString())


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    # A batch of two: a dimension of one would be taken for a constant.
    batch = torch.cat([example, example])
    try:
        with _quiet():
            return torch.export.export(model.eval(), (batch,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        said = str(error).split("\n")[0].rstrip(".")
        raise ConfigError(f"torch.export cannot trace this model ({said}); use format = 'lac'.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the deprecation notes of others' code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = logging.getLogger("torch.onnx")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
