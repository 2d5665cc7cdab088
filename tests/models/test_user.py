from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from laconic.core import ConfigError, Key, Task
from laconic.models import user_model


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(x)


class Needy(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


def make_net(**settings: int) -> nn.Module:
    return Net(**settings)


SOURCE = """
import torch
from torch import nn
from {name}_sibling import WIDTH

class Net(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.fc1 = nn.Linear(2, width)

    def forward(self, x):
        return self.fc1(x)

class Outer:
    Inner = Net

torch.manual_seed(3)
trained = Net()
number = 3

def oops():
    return [1]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A user's file in the current folder, under a name of its own per test."""
    name = "usernet_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    (tmp_path / f"{name}.py").write_text(SOURCE.format(name=name))
    (tmp_path / f"{name}_sibling.py").write_text("WIDTH = 5\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_an_instance_is_copied_and_brings_its_weights() -> None:
    mine = Net()
    build, initial = user_model(mine, {})
    assert initial is not None
    first = mine.fc1.weight.detach().clone()
    with torch.no_grad():
        mine.fc1.weight.zero_()
    assert torch.equal(initial["fc1.weight"], first)
    one, other = build(), build()
    assert type(one) is Net
    assert one is not other
    assert one is not mine
    assert torch.equal(one.get_parameter("fc1.weight"), first)
    assert torch.equal(Task(build, initial=initial).init(Key.from_seed(0))["fc1.weight"], first)


def test_buffers_are_weights_too_and_frozen_parameters_stay_frozen() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[0].requires_grad_(False)
    net(torch.randn(4, 2))
    build, initial = user_model(net, {})
    assert initial is not None
    assert torch.equal(initial["1.running_mean"], net[1].running_mean)
    assert not build().get_parameter("0.weight").requires_grad


@pytest.mark.parametrize("factory", [Net, make_net, lambda width=3: Net(width)], ids=["class", "function", "lambda"])
def test_a_class_or_function_is_called_with_the_settings(factory: object) -> None:
    build, initial = user_model(factory, {})  # type: ignore[arg-type]
    assert initial is None
    assert build().get_parameter("fc1.weight").shape == (3, 2)
    build, initial = user_model(factory, {"width": 4})  # type: ignore[arg-type]
    assert initial is None
    assert build().get_parameter("fc1.weight").shape == (4, 2)


def test_required_arguments_may_come_from_the_settings() -> None:
    build, _ = user_model(Needy, {"width": 6})
    assert build().get_parameter("fc1.weight").shape == (6, 2)


def test_looking_at_a_factory_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    user_model(Net, {})
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["Net", "Outer.Inner"])
def test_a_name_is_found_in_the_current_folder(module: str, name: str) -> None:
    path = list(sys.path)
    build, initial = user_model(f"{module}:{name}", {})
    assert initial is None
    assert sys.path == path
    assert build().get_parameter("fc1.weight").shape == (5, 2)
    assert sys.path == path
    assert user_model(f"{module}:{name}", {"width": 7})[0]().get_parameter("fc1.bias").shape == (7,)


def test_a_named_instance_brings_its_weights(module: str) -> None:
    state = torch.random.get_rng_state()
    build, initial = user_model(f"{module}:trained", {})
    torch.random.set_rng_state(state)  # the user's file seeds it
    assert initial is not None
    assert torch.equal(build().get_parameter("fc1.weight"), initial["fc1.weight"])
    assert build() is not build()


def test_an_installed_module_is_found() -> None:
    build, _ = user_model("torch.nn:Linear", {"in_features": 2, "out_features": 3})
    assert isinstance(build(), nn.Linear)


def test_builders_can_be_pickled(module: str) -> None:
    for model in (Net(), f"{module}:Net"):
        build, _ = user_model(model, {})
        again = pickle.loads(pickle.dumps(build))
        assert [p.shape for p in again().parameters()] == [p.shape for p in build().parameters()]


def test_a_named_model_is_found_by_a_process_that_started_elsewhere(module: str, tmp_path: Path) -> None:
    build, _ = user_model(f"{module}:Net", {"width": 2})
    (tmp_path / "elsewhere").mkdir()
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1]))().fc1.weight.shape)"
    command = [sys.executable, "-c", code, pickle.dumps(build).hex()]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch.Size([2, 2])"


def one_sentence(caught: pytest.ExceptionInfo[ConfigError]) -> str:
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("MODULE:Nett", "did you mean 'Net'?"),
        ("MODULE:Outer.Iner", "did you mean 'Inner'?"),
        ("MODULE:number", "must be something that can be called, got int"),
        ("MODULE:oops", "must give a torch module, got list"),
        ("MODULE:", 'must have the form "module.path:Name"'),
        (":Net", 'must have the form "module.path:Name"'),
        ("lenet", 'must have the form "module.path:Name"'),
        ("no_such_module_at_all:Net", "No module named 'no_such_module_at_all'"),
        ("./net.py:Net", "cannot import"),
        (".relative:Net", "cannot import"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_sentence(module: str, text: str, says: str) -> None:
    path = list(sys.path)
    with pytest.raises(ConfigError) as caught:
        user_model(text.replace("MODULE", module), {})
    assert says in one_sentence(caught)
    assert sys.path == path


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("def net(:", "invalid syntax"),
        ("raise SystemExit(1)", "(1)"),
        ("raise ValueError('two\\nlines')", "two lines"),
        ("assert False", "AssertionError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_sentence(module: str, tmp_path: Path, source: str, says: str) -> None:
    name = f"{module}_broken"
    (tmp_path / f"{name}.py").write_text(source)
    path = list(sys.path)
    with pytest.raises(ConfigError) as caught:
        user_model(f"{name}:Net", {})
    assert says in one_sentence(caught)
    assert sys.path == path


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (Net(), {"width": 3}, "is made already, so it takes no setting 'width'"),
        (Net, {"widht": 3}, "did you mean 'width'?"),
        (lambda: Net(), {"width": 3}, "it takes no settings"),
        (Needy, {}, "cannot be made without its argument 'width'"),
        (lambda width, /: Net(width), {}, "cannot be made without its argument 'width'"),
        (lambda: None, {}, "must give a torch module, got NoneType"),
        (lambda: Net, {}, "must give a torch module, got type"),
        (nn.LazyLinear(3), {}, "'weight' has no shape yet"),
        (lambda: nn.LazyLinear(3), {}, "'weight' has no shape yet"),
        (3, {}, "got int"),
        (None, {}, "got NoneType"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),
)
def test_what_is_no_model_is_one_sentence(model: object, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        user_model(model, settings)  # type: ignore[arg-type]
    assert says in one_sentence(caught)


def test_a_module_that_cannot_be_copied_is_one_sentence() -> None:
    net = Net()
    net.cached = net.fc1.weight * 2
    with pytest.raises(ConfigError, match="model Net cannot be copied") as caught:
        user_model(net, {})
    one_sentence(caught)


def test_an_error_in_the_users_constructor_is_the_users_to_see() -> None:
    def broken() -> nn.Module:
        return nn.Linear(-1, 3)

    with pytest.raises(RuntimeError):
        user_model(broken, {})
