from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.methods.conftest import definition
from torch import Tensor, nn

from laconic.codecs import float32
from laconic.core import ClientInfo, ConfigError, Key, Reply, Tree, prefixed, spec_of, subtree, tree_sha256
from laconic.engine import Link, Schedule, Simulation, pack, unpack
from laconic.evaluations import EVALUATIONS
from laconic.methods import ServerOptimizer, Solver, fedopt
from laconic.methods.catalogue import methods
from laconic.testing import small_federation, small_task

KEY = Key.from_seed(0)
OPTIMIZERS = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adam", {}),
    ("adam", {"betas": (0.9, 0.99), "eps": 1e-3, "amsgrad": True}),
    ("adamw", {"weight_decay": 0.1}),
    ("adamax", {}),
    ("adagrad", {"initial_accumulator_value": 0.1}),
    ("adadelta", {}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
    ("nadam", {}),
    ("radam", {}),
    ("rprop", {}),
    ("asgd", {}),
    ("adafactor", {}),
]
NAMES = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)}


def weights() -> Tree:
    rng = KEY.torch()
    return {"a.weight": torch.randn(5, 4, generator=rng), "a.bias": torch.randn(5, generator=rng)}


def direction(number: int) -> Tree:
    rng = KEY.fold_in("round", number).torch()
    return {name: torch.randn(leaf.shape, generator=rng) for name, leaf in weights().items()}


def by_hand(name: str, lr: float, options: dict[str, Any], rounds: int) -> list[Tree]:
    """One optimizer object for all rounds, as anyone would write it."""
    parameters = {n: nn.Parameter(leaf.clone()) for n, leaf in weights().items()}
    optimizer = NAMES[name](parameters.values(), lr=lr, **options)
    trace = []
    for number in range(rounds):
        for n, parameter in parameters.items():
            parameter.grad = -direction(number)[n]
        optimizer.step()
        trace.append({n: parameter.detach().clone() for n, parameter in parameters.items()})
    return trace


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=[f"{n} {o}" for n, o in OPTIMIZERS])
def test_steps_are_those_of_torch_with_its_state_in_a_tree(name: str, options: dict[str, Any]) -> None:
    server = ServerOptimizer(name, lr=0.05, options=options)
    at, state = weights(), {}
    for number, expected in enumerate(by_hand(name, 0.05, options, rounds=6)):
        # Through bytes, as a checkpoint keeps it.
        at, state = server.step(unpack(pack(at)), direction(number), unpack(pack(state)))
        assert all(isinstance(leaf, Tensor) for leaf in state.values())
        for n, leaf in expected.items():
            assert torch.equal(at[n], leaf), f"round {number + 1}, {n}"


def test_every_optimizer_of_torch_is_either_tested_or_refused() -> None:
    known = {n for n, cls in NAMES.items() if issubclass(cls, torch.optim.Optimizer)} - {"optimizer"}
    for name in known - {name for name, _ in OPTIMIZERS}:
        with pytest.raises(ConfigError, match=f"server optimizer {name!r} cannot be used here"):
            ServerOptimizer(name)


def test_inputs_stay_as_they_are() -> None:
    server = ServerOptimizer("adam", lr=0.1)
    at, state = server.step(weights(), direction(0), {})
    ascent = direction(1)
    before = tree_sha256(at), tree_sha256(ascent), tree_sha256(state)
    server.step(at, ascent, state)
    assert (tree_sha256(at), tree_sha256(ascent), tree_sha256(state)) == before


def test_only_leaves_with_a_direction_move() -> None:
    moved, state = ServerOptimizer("adam").step(weights(), {"a.bias": torch.ones(5)}, {})
    assert list(moved) == ["a.bias"]
    assert {name.rsplit("/", 1)[0] for name in state} == {"a.bias"}


class Counting(torch.optim.Optimizer):
    """An optimizer whose state holds plain numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["third"] = state.get("third", 0.0) + 1 / 3
            state["nothing"] = None
            parameter.data.add_(parameter.grad, alpha=-state["third"] * state["count"])


def test_plain_numbers_in_a_state_are_kept_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Counting", Counting, raising=False)
    state: Tree = {}
    for _ in range(3):
        _, state = ServerOptimizer("counting").step({"w": torch.zeros(1)}, {"w": torch.ones(1)}, state)
    assert {name: leaf.item() for name, leaf in state.items()} == {"w/count#": 3, "w/third#": 1 / 3 + 1 / 3 + 1 / 3}


# --- in a method -----------------------------------------------------------------------------------------------------


def replies(messages: list[Tree]) -> list[Reply]:
    return [Reply(ClientInfo(i, 1, 10 * (i + 1)), message, {}) for i, message in enumerate(messages)]


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_fedopt_feeds_minus_the_mean_difference_and_carries_the_state(name: str) -> None:
    task = small_task()
    method = fedopt(server=ServerOptimizer(name, lr=0.1)).bind(task)
    server = method.init(KEY)
    parameters = {n: nn.Parameter(leaf.clone()) for n, leaf in task.init(KEY).items()}
    optimizer = NAMES[name](parameters.values(), lr=0.1)
    for number in range(4):
        rng = KEY.fold_in(number).torch()
        messages = [{n: torch.randn(leaf.shape, generator=rng) for n, leaf in task.spec.items()} for _ in range(4)]
        server = method.server_update(server, replies(messages), KEY)
        for n, parameter in parameters.items():
            total = messages[0][n]
            for message in messages[1:]:
                total = total + message[n]
            parameter.grad = -(total / 4)
        optimizer.step()
        for n, leaf in subtree("w", server).items():
            assert torch.equal(leaf, parameters[n].detach())
    assert list(subtree("w", server)) == list(task.spec)
    assert subtree("optimizer", server)


def test_running_statistics_are_averaged_not_optimised() -> None:
    task = small_task(batch_norm=True)
    method = fedopt(server=ServerOptimizer("adam", lr=0.5)).bind(task)
    server = method.init(KEY)
    rng = KEY.torch()
    messages = [{n: torch.rand(leaf.shape, generator=rng) for n, leaf in task.spec.items()} for _ in range(2)]
    new = method.server_update(server, replies(messages), KEY)
    for name in task.spec:
        mean = (messages[0][name] + messages[1][name]) / 2
        averaged = torch.equal(new[f"w/{name}"], server[f"w/{name}"] + mean)
        assert averaged == (name in ("1.running_mean", "1.running_var")), name
        assert (f"optimizer/{name}/exp_avg" in new) != averaged


def test_the_state_grows_once_and_keeps_its_form() -> None:
    task = small_task()
    specs = []
    for rounds in (1, 2, 3):
        simulation = Simulation(
            fedopt(solver=Solver(local_epochs=1)),
            task,
            small_federation(),
            Link(float32(), float32()),
            Schedule(rounds=rounds, cohort=3),
            seed=0,
            workers=0,
            evaluations=EVALUATIONS,
        )
        list(simulation)
        specs.append(spec_of(simulation.state.server))
    assert specs[0] == specs[1] == specs[2]
    assert list(subtree("w", specs[0])) == list(task.spec)  # type: ignore[arg-type]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "lbfgs"}, "server optimizer 'lbfgs' cannot be used here: "),
        ({"name": "sparseadam"}, "server optimizer 'sparseadam' cannot be used here: SparseAdam does not support"),
        ({"name": "adm"}, "unknown server optimizer 'adm'; did you mean 'adam'?"),
        ({"name": "optimizer"}, "unknown server optimizer 'optimizer'; "),
        ({"name": ""}, "unknown server optimizer ''; known: "),
        ({"name": "sgd", "lr": -1.0}, "the server optimizer's lr must be positive and finite, got -1.0"),
        ({"name": "adam", "lr": math.nan}, "the server optimizer's lr must be positive and finite, got nan"),
        ({"name": "sgd", "options": {"momentun": 0.9}}, "server optimizer 'sgd' cannot be used here: "),
        ({"name": "sgd", "options": {"nesterov": True}}, "server optimizer 'sgd' cannot be used here: Nesterov"),
        ({"name": "adam", "options": {"betas": [2.0, 0.9]}}, "server optimizer 'adam' cannot be used here: Invalid"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as made:
        ServerOptimizer(**settings)
    assert str(made.value).startswith(said)
    with pytest.raises(ConfigError) as configured:
        methods.build("fedopt", {"server": settings})
    assert str(configured.value) == str(made.value)


def test_names_are_of_any_case() -> None:
    one, other = (ServerOptimizer(name, lr=0.1).step(weights(), direction(0), {})[0] for name in ("AdamW", "adamw"))
    assert tree_sha256(one) == tree_sha256(other)


def test_a_configuration_says_the_same_as_python() -> None:
    made = methods.build("fedopt", {"server": {"name": "sgd", "lr": 1, "options": {"momentum": 0.9}}, "mu": 0.1})
    assert definition(made) == definition(fedopt(server=ServerOptimizer("sgd", 1.0, {"momentum": 0.9}), mu=0.1))
    assert definition(made) != definition(fedopt(server=ServerOptimizer("sgd", 1.0, {"momentum": 0.8}), mu=0.1))


def test_prefixes_do_not_meet() -> None:
    # A leaf of the model may be called like an entry of an optimizer's state.
    tree = {"step": torch.zeros(1), "step/exp_avg": torch.zeros(1)}
    server = ServerOptimizer("adam", lr=0.1)
    at, state = server.step(tree, {name: torch.ones(1) for name in tree}, {})
    again, _ = server.step(
        at, {name: torch.ones(1) for name in tree}, subtree("optimizer", prefixed("optimizer", state))
    )
    torch.testing.assert_close(again["step"], torch.tensor([0.2]), rtol=1e-6, atol=0.0)
    assert torch.equal(again["step"], again["step/exp_avg"])


def test_adam_needs_none_of_torchs_optimizers() -> None:
    """The first use of one imports a compiler, which would cost every process of a comparison a second."""
    code = """
import sys
import laconic as lc
lc.fit(method=lc.fedopt(optimizer="adam", lr=0.01), data=lc.data.digits(clients=3), rounds=1, cohort=2, workers=0)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
