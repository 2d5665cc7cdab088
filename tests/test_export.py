import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import laconic as lc
from laconic.core import ConfigError, DataError, RunError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> lc.Run:
    return lc.fit(
        method=lc.fedsparse(lambda0=1e-3),
        data=lc.data.digits(clients=10),
        rounds=6,
        cohort=5,
        workers=0,
        init="glorot",
        out=tmp_path_factory.mktemp("runs"),
    )


def folder(run: lc.Run) -> Path:
    assert run.directory is not None
    return run.directory


X = lc.data.digits(clients=10).x[:40]


def outputs(run: lc.Run) -> torch.Tensor:
    with torch.no_grad():
        return run.model(X)


def test_a_torch_program_needs_nothing_of_laconic(run: lc.Run, tmp_path: Path) -> None:
    made = lc.export(folder(run), format="torch")
    np.save(tmp_path / "x.npy", X.numpy())
    code = f"""
import sys, numpy, torch
program = torch.export.load({str(made.path)!r}).module()
y = program(torch.from_numpy(numpy.load({str(tmp_path / "x.npy")!r})))
assert not [name for name in sys.modules if name.startswith("laconic")]
numpy.save({str(tmp_path / "y.npy")!r}, y.detach().numpy())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert np.abs(np.load(tmp_path / "y.npy") - outputs(run).numpy()).max() <= 1e-5


def test_an_onnx_model_predicts_the_same(run: lc.Run) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    made = lc.export(folder(run), format="onnx")
    session = runtime.InferenceSession(made.path)
    for size in (1, 40):  # the batch is free
        (y,) = session.run(None, {session.get_inputs()[0].name: X[:size].numpy()})
        assert np.abs(y - outputs(run)[:size].numpy()).max() <= 1e-5


def test_what_is_exported_is_smaller_and_says_so(run: lc.Run) -> None:
    made = lc.export(folder(run), format="lac", values="int8")
    assert made.path.name == "exported.lac"
    assert made.num_bytes == made.path.stat().st_size
    assert made.whole_bytes == 4 * run.summary["parameters"]
    assert made.num_bytes < made.whole_bytes / 3.5
    assert made.parameters < made.whole_parameters
    assert made.multiply_adds == run.summary["multiply_adds"] < made.whole_multiply_adds
    agree = (lc.load(made.path)(X).argmax(1) == outputs(run).argmax(1)).float().mean()
    assert float(agree) >= 0.95


def test_a_file_serves_as_well_as_a_folder(run: lc.Run, tmp_path: Path) -> None:
    made = lc.export(folder(run) / "model.lac", format="lac", out=tmp_path / "copy.lac")
    assert made.path.read_bytes() == (folder(run) / "model.lac").read_bytes()


def test_mistakes_are_named(run: lc.Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this is no run's folder"):
        lc.export(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(DataError, match="the run has not ended"):
        lc.export(tmp_path)
    with pytest.raises(ConfigError, match="exported as torch, onnx, lac, got 'tflite'"):
        lc.export(folder(run), format="tflite")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="goes with format = 'lac'"):
        lc.export(folder(run), format="torch", values="int8")
    with pytest.raises(RunError, match="cannot write"):
        lc.export(folder(run), format="torch", out=tmp_path / "no" / "folder.pt2")


def test_a_model_that_cannot_be_traced_is_answered_with_a_sentence(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x.flatten(1))
            return y if float(y.detach().sum()) > 1e9 else 2 * y

    run = lc.fit(model=Odd, data=lc.data.digits(clients=10), rounds=1, cohort=3, workers=0, out=tmp_path)
    with pytest.raises(ConfigError, match="use format = 'lac'"):
        lc.export(folder(run), format="torch", model=Odd)
    assert not list(folder(run).glob(".tmp*"))
    assert lc.export(folder(run), format="lac", model=Odd).num_bytes > 0
