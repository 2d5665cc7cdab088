"""From Python: parts to a run, a user's own model, loss, metrics and weights, and devices."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import laconic as lc
from laconic.experiment import make_task

ROUNDS: dict[str, Any] = {"rounds": 2, "cohort": 3, "workers": 0, "eval_every": 1}


@pytest.fixture(scope="module")
def digits() -> lc.Federation:
    return lc.data.digits(clients=6, limit=300)


class Net(nn.Module):
    """A user's own model, made by a class without arguments; it uses torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 8)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.hidden(x.flatten(1)).relu()))


def quick(digits: lc.Federation, **options: Any) -> lc.Run:
    return lc.fit(**{"data": digits, **ROUNDS, **options})


def test_a_run_from_python(digits: lc.Federation) -> None:
    run = lc.fit(
        method=lc.fedprox(mu=0.01), model=Net, data=digits, rounds=3, cohort=4, seed=1, workers=0, eval_every=2
    )
    assert [record["round"] for record in run.history] == [1, 2, 3]
    assert run.directory is None
    assert (run.summary["method"], run.summary["model"], run.summary["data"]) == ("fedprox", "Net", "digits")
    assert run.summary["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert isinstance(run.model, Net)
    x, y = digits.test.tensors()
    accuracy = float((run.model(x).argmax(1) == y).float().mean())
    assert run.summary["global_accuracy"] == pytest.approx(accuracy)


def test_methods_by_name_and_by_object_are_the_same(digits: lc.Federation) -> None:
    runs = [quick(digits, method=method) for method in ("fedavg", lc.fedavg())]
    assert runs[0].summary["state_sha256"] == runs[1].summary["state_sha256"]
    with pytest.raises(lc.ConfigError, match="unknown method 'fedavgg'; did you mean 'fedavg'"):
        quick(digits, method="fedavgg")


def test_first_weights_from_a_module_a_state_dict_and_a_file(digits: lc.Federation, tmp_path: Path) -> None:
    torch.manual_seed(5)
    net = Net()
    safetensors.torch.save_file(net.state_dict(), tmp_path / "w.safetensors")
    file = tmp_path / "w.safetensors"
    options: list[dict[str, Any]] = [
        {"model": net},
        {"model": Net, "init": net.state_dict()},
        {"model": Net, "init": file},
        {"model": Net, "init": str(file)},
        {"model": Net},
    ]
    hashes = [quick(digits, **each).summary["state_sha256"] for each in options]
    assert len(set(hashes[:4])) == 1
    assert hashes[4] != hashes[0]
    task = make_task(digits, Net, init=file)
    assert torch.equal(task.init(lc.Key.from_seed(0))["out.bias"], net.out.bias)


def test_what_a_run_gives_another_can_start_from(digits: lc.Federation, tmp_path: Path) -> None:
    first = quick(digits, out=tmp_path, name="first")
    second = make_task(digits, "mlp", init=tmp_path / "first" / "model.safetensors")
    for name, leaf in second.init(lc.Key.from_seed(9)).items():
        assert torch.equal(leaf, first.model.state_dict()[name])


def test_weights_that_do_not_fit_are_refused(digits: lc.Federation) -> None:
    good = Net().state_dict()
    with pytest.raises(lc.ConfigError, match=r"model\.init has no weights for 'out\.bias'"):
        quick(digits, model=Net, init={n: v for n, v in good.items() if n != "out.bias"})
    with pytest.raises(lc.ConfigError, match=r"model\.init gives 'out\.bias' the shape \(3,\)"):
        quick(digits, model=Net, init={**good, "out.bias": torch.zeros(3)})
    with pytest.raises(lc.ConfigError, match=r"model\.init: 'out\.bias' holds NaN or infinite values"):
        quick(digits, model=Net, init={**good, "out.bias": torch.full((10,), math.nan)})
    with pytest.raises(lc.ConfigError, match=r"cannot read nowhere"):
        quick(digits, model=Net, init="nowhere")


def test_a_users_own_loss_and_metrics(digits: lc.Federation) -> None:
    def smooth(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.3)

    def even(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) % 2 == target % 2).float()

    run = quick(digits, loss=smooth, metrics={"even": even})
    x, y = digits.test.tensors()
    with torch.no_grad():
        output = run.model(x)
    assert run.summary["global_even"] == pytest.approx(float(even(output, y).mean()))
    assert run.summary["global_loss"] == pytest.approx(float(smooth(output, y)), rel=1e-5)
    assert run.summary["global_accuracy"] is None
    assert "local_even" in run.history[-1]
    assert run.summary["state_sha256"] != quick(digits).summary["state_sha256"]


def test_regression_needs_no_accuracy() -> None:
    data = lc.data.synthetic(clients=5, features=4, train_examples=30, test_examples=10, noise=0.1)
    run = lc.fit(
        data=data, model="logistic", rounds=5, cohort=5, workers=0, method=lc.fedavg(solver=lc.Solver(lr=0.05))
    )
    assert run.summary["global_accuracy"] is None
    assert "global_accuracy" not in run.history[-1]
    x, y = data.test.tensors()
    with torch.no_grad():
        loss = float(F.mse_loss(run.model(x), y))
    assert run.summary["global_loss"] == pytest.approx(loss, rel=1e-5)
    assert loss < float(y.square().mean()) / 2


def test_a_model_that_does_not_fit_the_data_is_refused_before_it_runs(digits: lc.Federation) -> None:
    with pytest.raises(lc.ConfigError, match=r"^the model does not fit the data: inputs of shape \(1, 8, 8\)"):
        quick(digits, model=nn.Linear(3, 2))
    with pytest.raises(lc.ConfigError, match="the model does not fit the data"):
        quick(digits, loss=lambda output: output.sum())


def batch_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def raising(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise LookupError("no such class")


def per_example(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none")


FUNCTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a mean over the batch": (
        {"metrics": {"mine": batch_mean}},
        "the metric 'mine' must give one value per example, got shape () for a batch of 3; "
        "leave the mean to the evaluation.",
    ),
    "a plain number": (
        {"metrics": {"mine": lambda output, target: 0.5}},
        "the metric 'mine' must give one value per example, got a float for a batch of 3; "
        "leave the mean to the evaluation.",
    ),
    "a value per class": (
        {"metrics": {"mine": lambda output, target: output.sum(dim=0)}},
        "the metric 'mine' must give one value per example, got shape (10,) for a batch of 3; "
        "leave the mean to the evaluation.",
    ),
    "a loss per example": (
        {"loss": per_example},
        "the loss must give one number, the mean over a batch, got shape (3,) for a batch of 3.",
    ),
    "a loss that is a number": (
        {"loss": lambda output, target: 1.0},
        "the loss must give one number, the mean over a batch, got a float for a batch of 3.",
    ),
    "a metric that raises": (
        {"metrics": {"mine": raising}},
        "the model does not fit the data: inputs of shape (1, 8, 8) and targets of digits gave LookupError "
        "in the metric 'mine' (no such class).",
    ),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_losses_and_metrics_are_tried_out_before_anything_runs(digits: lc.Federation, case: str) -> None:
    options, said = FUNCTIONS[case]
    with pytest.raises(lc.ConfigError) as caught:
        quick(digits, **options)
    assert str(caught.value) == said


def test_a_metric_may_give_a_column(digits: lc.Federation) -> None:
    """One value per example, however it is shaped beyond that."""
    run = quick(digits, metrics={"mine": lambda output, target: (output.argmax(1) == target).float()[:, None]})
    same = quick(digits)
    assert run.summary["global_mine"] == same.summary["global_accuracy"]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "arrays": (
        {"data": (np.zeros((4, 2)), np.zeros(4))},
        "data must be a Federation, got a tuple; make one with lc.data.digits(clients=…) or "
        "lc.Federation.from_arrays((x, y), clients=…).",
    ),
    "a method that was not called": (
        {"method": lc.fedavg},
        "method must be a Method or a name, got a function (fedavg); call it: fedavg().",
    ),
    "a number for a method": ({"method": 3}, "method must be a Method or a name, got an int."),
    "a seed of letters": ({"seed": "a"}, "fit: seed: should be a valid integer, got 'a'."),
    "a negative seed": ({"seed": -1}, "run.seed must be a whole number and not negative, got -1."),
    "a seed that is true": ({"seed": True}, "fit: seed: should be a valid integer, got True."),
    "rounds as text": ({"rounds": "3"}, "fit: rounds: should be a valid integer, got '3'."),
    "rounds in parts": ({"rounds": 2.5}, "fit: rounds: should be a valid integer, got 2.5."),
    "no rounds": ({"rounds": 0}, "run.rounds must be at least 1, got 0."),
    "a misspelt argument": ({"cohrt": 3}, "fit: unknown argument 'cohrt'; did you mean 'cohort'?"),
    "a misspelt part": ({"metod": "fedavg"}, "fit: unknown argument 'metod'; did you mean 'method'?"),
    "a store that is none": ({"store": "tape"}, "fit: store: should be 'memory' or 'disk', got 'tape'."),
    "the new test": ({"new_test": True}, 'fit: new_test is no more; add "ensemble" to run.evaluations.'),
    "no local evaluation": ({"local_eval": False}, 'fit: local_eval is no more; leave "local" out of run.evaluations.'),
    "a probe": (
        {"probe": "fc1"},
        'fit: probe is no more; add { name = "probe", layer = … } to run.evaluations.',
    ),
    "a newcomer": (
        {"newcomer": object()},
        "fit: newcomer is no more; give a section [newcomer], or data.joined_later(after=…) in Python.",
    ),
    "an evaluation that is none": ({"evaluations": ["globl"]}, "unknown evaluation 'globl'; did you mean 'global'?"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_python_is_one_sentence(digits: lc.Federation, case: str) -> None:
    options, said = MISTAKES[case]
    with pytest.raises(lc.ConfigError) as caught:
        quick(digits, **options)
    assert str(caught.value) == said


def test_settings_of_the_solver_stand_directly_or_in_a_solver_and_not_in_both(digits: lc.Federation) -> None:
    direct, whole = lc.fedavg(lr=0.1), lc.fedavg(solver=lc.Solver(lr=0.1))
    assert (direct.name, direct.settings, direct.link) == (whole.name, whole.settings, whole.link)
    one, other = (quick(digits, method=method).summary["state_sha256"] for method in (direct, whole))
    assert one == other != quick(digits).summary["state_sha256"]
    assert lc.fedpm(lr=0.5).settings["batch_size"] == 128, "what is not given is the method's own default"
    with pytest.raises(lc.ConfigError, match=r"^fedavg: give solver, or its fields directly, not both\.$"):
        lc.fedavg(lr=0.1, solver=lc.Solver())
    with pytest.raises(lc.ConfigError, match=r"^fedavg: unknown key 'lrr'; did you mean 'lr'\?$"):
        lc.fedavg(lrr=1)


@pytest.mark.parametrize("device", ["cuda", "mps", "meta", "nonsense", "cuda:99"])
def test_devices_that_are_not_there(digits: lc.Federation, device: str) -> None:
    if {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(device, bool)():
        pytest.skip("this machine has it")
    with pytest.raises(lc.ConfigError, match=rf"^run\.device '{device}' cannot be used here: [^\n]*\.$"):
        quick(digits, device=device)


def test_codecs_as_text_and_as_lists(digits: lc.Federation) -> None:
    runs = [quick(digits, up=up) for up in ("topk:fraction=0.1 | eden:bits=4", ["topk:fraction=0.1", "eden:bits=4"])]
    assert runs[0].summary["state_sha256"] == runs[1].summary["state_sha256"]
    assert runs[0].summary["up"] == runs[1].summary["up"]
    assert runs[0].summary["bits_per_parameter_up"] < 2
    with pytest.raises(lc.ConfigError, match="unknown codec 'flat32'; did you mean 'float32'"):
        quick(digits, up="flat32")


# --- resuming from Python ----------------------------------------------------------------------------------------


def changed(digits: lc.Federation, change: str) -> dict[str, Any]:
    other = lc.data.digits(clients=6, limit=300, seed=1)
    return {
        "lr": {"method": lc.fedavg(solver=lc.Solver(lr=0.3))},
        "partition": {"data": other},
        "pixels": {"data": dataclasses.replace(digits, x=digits.x.flip(0))},
        "weights": {"init": make_task(digits, "mlp").init(lc.Key.from_seed(7))},
        "loss": {"loss": F.multi_margin_loss},
        "model": {"model": "logistic"},
        "seed": {"seed": 1},
        "rounds": {"rounds": 1},
        "up": {"up": "float16"},
    }[change]


@pytest.mark.parametrize("change", ["lr", "partition", "pixels", "weights", "loss", "model", "seed", "rounds", "up"])
def test_a_changed_run_is_not_resumed(digits: lc.Federation, tmp_path: Path, change: str) -> None:
    """Objects have no settings to compare, so their contents are."""
    quick(digits, out=tmp_path)
    with pytest.raises(lc.RunError, match=r"^cannot resume .*run: [a-z0-9._]+ was .* and is .* now"):
        quick(digits, **changed(digits, change), out=tmp_path, resume=True)


def test_an_unchanged_run_is_resumed(digits: lc.Federation, tmp_path: Path) -> None:
    first = quick(digits, model=Net, loss=F.multi_margin_loss, out=tmp_path)
    again = lc.data.digits(clients=6, limit=300)
    resumed = quick(again, model=Net, loss=F.multi_margin_loss, out=tmp_path, resume=True, workers=1)
    assert resumed.summary == first.summary


def test_channels_last_is_the_same_up_to_rounding() -> None:
    data = lc.Federation.from_arrays(
        (np.random.default_rng(0).normal(size=(60, 1, 8, 8)), np.arange(60) % 3), clients=3
    )
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    one, other = (
        lc.fit(method="fedavg", data=data, model=model, rounds=2, cohort=3, workers=0, layout=order)
        for order in ("contiguous", "channels_last")
    )
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
