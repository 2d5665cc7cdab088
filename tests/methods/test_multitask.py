from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.methods.conftest import inside

from laconic.codecs import parse
from laconic.core import ConfigError, Method, Tree
from laconic.engine import Link, Schedule, Simulation, unpack
from laconic.evaluations import EVALUATIONS
from laconic.methods import MultiTask, Solver, mtl
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)
FEDERATION = small_federation()


def simulation(method: Any, *, cohort: int, rounds: int = 3) -> Simulation:
    link = Link(parse("float32"), parse("float32"))
    schedule = Schedule(rounds=rounds, cohort=cohort, eval_every=1)
    return Simulation(method, small_task(), FEDERATION, link, schedule, seed=0, workers=0, evaluations=EVALUATIONS)


def own(run: Simulation) -> dict[int, Tree]:
    return {
        client: {name.removeprefix("own/"): leaf for name, leaf in unpack(packed).items()}
        for client, packed in run.state.personal.items()
    }


def gradients(method: Method, weights: list[Tree], device: int) -> Tree:
    """What the method adds to the gradient of a device."""
    bound: MultiTask = inside(method.bind(small_task()))
    names = bound.task.trainable
    mean = {name: torch.stack([w[name] for w in weights]).mean(dim=0) for name in names}
    added = [torch.zeros_like(weights[device][name]) for name in names]
    pull = bound.pull(mean, weights[device], len(weights))
    assert pull is not None
    assert pull.gradient is not None
    pull.gradient([weights[device][name] for name in names], added)
    return dict(zip(names, added, strict=True))


def penalty(weights: list[Tree], names: tuple[str, ...], omega: torch.Tensor, one: float, two: float) -> torch.Tensor:
    matrix = torch.stack([torch.cat([w[name].flatten() for name in names]) for w in weights], dim=1)  # d × M
    return one * torch.trace(matrix @ omega @ matrix.T) + two * matrix.square().sum()


@pytest.mark.parametrize("omega", ["mean", "published"])
def test_the_gradient_is_that_of_the_matrix_form(omega: Any) -> None:
    """§9.5 (f): Ω = (I − 11ᵀ/M)², a product of matrices; as published, squares of elements."""
    generator, devices = torch.Generator().manual_seed(0), 4
    names = small_task().trainable
    shapes = {name: small_task().spec[name].shape for name in names}
    weights = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(devices)
    ]
    ones = torch.ones(devices, devices, dtype=torch.float64)
    centring = torch.eye(devices, dtype=torch.float64) - ones / devices
    matrix = centring @ centring if omega == "mean" else (ones - ones / devices).square()
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in w.items()} for w in weights]
    total = penalty(leaves, names, matrix, 0.3, 0.7)
    method = mtl(lambda1=0.3, lambda2=0.7, omega=omega)
    for device in range(devices):
        expected = torch.autograd.grad(total, list(leaves[device].values()), retain_graph=True)
        got = gradients(method, weights, device)
        for name, wanted in zip(names, expected, strict=True):
            torch.testing.assert_close(got[name], wanted)


@pytest.mark.parametrize("cohort", [6, 2])
def test_the_server_holds_the_mean_of_all_devices_it_met(cohort: int) -> None:
    run = simulation(mtl(lambda1=0.01, solver=SOLVER), cohort=cohort, rounds=5)
    for _ in run:
        models = own(run)
        assert len(models) == len(run.state.server["met"])
        for name in small_task().spec:
            mean = torch.stack([model[name].double() for model in models.values()]).mean(dim=0)
            torch.testing.assert_close(run.state.server[f"w/{name}"].double(), mean, atol=1e-6, rtol=0)


def test_a_strong_penalty_brings_devices_together() -> None:
    def spread(lambda1: float) -> float:
        run = simulation(mtl(lambda1=lambda1, lambda2=0.0, solver=SOLVER), cohort=6, rounds=6)
        for _ in run:
            pass
        models = own(run)
        return sum(
            float(torch.stack([model[name] for model in models.values()]).var(dim=0).sum()) for name in models[0]
        )

    assert spread(1.0) < 0.5 * spread(0.0)


def test_without_penalty_devices_are_alone() -> None:
    run = simulation(mtl(lambda1=0.0, lambda2=0.0, solver=SOLVER), cohort=6, rounds=2)
    other = simulation(mtl(lambda1=0.0, lambda2=0.0, omega="published", solver=SOLVER), cohort=6, rounds=2)
    for _ in run:
        pass
    for _ in other:
        pass
    assert dict(run.state.personal) == dict(other.state.personal)


def test_it_keeps_the_laws_as_published_too() -> None:
    check_method(mtl(omega="published", solver=SOLVER), workers=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"lambda1": -1.0}, "lambda1 must be finite and ≥ 0, got -1.0"), ({"omega": "meen"}, "did you mean 'mean'")],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mtl(**settings)
