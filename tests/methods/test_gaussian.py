from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from laconic.codecs import float32
from laconic.core import ClientData, ClientInfo, ConfigError, Key, Method, Part, Task, tree_sha256
from laconic.engine import Link, Record, Schedule, Simulation
from laconic.evaluations import EVALUATIONS
from laconic.methods import Gaussian, ServerOptimizer, Solver, Vote, fedavg, fedopt, fedprox
from laconic.testing import small_federation, small_task

SOLVER = Solver(lr=0.1, momentum=0.5, local_epochs=2, batch_size=4)
KEY = Key.from_seed(0)


def run(method: Method, *, batch_norm: bool = True) -> tuple[str, list[Record]]:
    """The final state of a whole run, and all its figures but the times."""
    schedule = Schedule(rounds=5, cohort=4, eval_every=2)
    link = Link(float32(), float32())
    task, data = small_task(batch_norm=batch_norm), small_federation()
    simulation = Simulation(method, task, data, link, schedule, seed=1, workers=0, evaluations=EVALUATIONS)
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in simulation]
    weights = {name: leaf for name, leaf in simulation.state.server.items() if name.startswith("w/")}
    return tree_sha256(weights), records


# --- FedProx ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_fedprox_without_precision_is_fedavg_bit_for_bit(weighting: str) -> None:
    chosen = {"weighting": weighting, "solver": SOLVER}
    assert run(fedprox(mu=0.0, **chosen)) == run(fedavg(**chosen))  # type: ignore[arg-type]
    assert run(fedprox(mu=0.1, **chosen))[0] != run(fedavg(**chosen))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", [0.5, 3.0])
def test_the_pull_is_the_gradient_of_the_penalty(precision: float) -> None:
    task = small_task()
    centre = task.init(KEY)
    weights = [torch.nn.Parameter(leaf) for leaf in task.init(KEY.fold_in("other")).values()]
    penalty = precision / 2 * sum((w - centre[n]).square().sum() for w, n in zip(weights, task.trainable, strict=True))
    expected = torch.autograd.grad(torch.as_tensor(penalty), weights)
    gradients = [torch.zeros_like(w) for w in weights]
    pull = Gaussian(precision).pull(centre, task)
    assert pull is not None
    assert pull.gradient is not None
    with torch.no_grad():
        pull.gradient(list(weights), gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-7)


def test_the_pull_is_added_to_the_gradient_of_the_data() -> None:
    task = small_task()
    pull = Gaussian(2.0).pull(task.init(KEY), task)
    weights = list(task.init(KEY).values())
    gradients = [torch.full_like(w, 3.0) for w in weights]
    assert pull is not None
    assert pull.gradient is not None
    pull.gradient(weights, gradients)
    assert all(bool((gradient == 3.0).all()) for gradient in gradients)  # φ = w: nothing is added


class One(nn.Module):
    """A model with one weight φ that predicts it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x))


def one_task(tau: float) -> Task:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return tau / 2 * (output - target).square().mean()

    return Task(One, loss=loss, metrics={}, outputs="values")


def test_a_client_that_converges_ends_at_the_mode_of_its_posterior() -> None:
    # −log p(φ|D) = (τ/2) mean (x − φ)² + (λ/2)(φ − w)², whose minimum is (λw + τ mean x)/(λ + τ).
    tau, precision, w = 2.0, 0.5, 1.0
    x = torch.tensor([3.0, 5.0, 10.0])
    data = ClientData(Part.whole(x, x), Part.whole(x, x))
    method = fedprox(mu=precision, solver=Solver(lr=0.2, local_epochs=60, batch_size=3)).bind(one_task(tau))
    update = method.client_update({"weight": torch.tensor([w])}, {}, data, ClientInfo(0, 1, 0), KEY)
    mode = (precision * w + tau * 6.0) / (precision + tau)
    torch.testing.assert_close(update.message["weight"], torch.tensor([mode - w]), rtol=1e-6, atol=1e-6)


# --- the M-step ------------------------------------------------------------------------------------------------------


def test_fedavg_is_a_gradient_m_step_of_plain_sgd_with_a_rate_of_1() -> None:
    averaged, stepped = run(fedavg(solver=SOLVER)), run(fedopt(server=ServerOptimizer("sgd", lr=1.0), solver=SOLVER))
    assert averaged == stepped


@pytest.mark.parametrize("precision", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("clients", [1, 2, 4, 16])
def test_the_mean_is_the_gradient_step_exactly(precision: float, clients: int) -> None:
    # w + (1/(λS))·λΣ(φ_s − w) = mean_s φ_s. In powers of two and small integers nothing is rounded.
    rng = KEY.fold_in(clients).numpy()
    w = torch.from_numpy(rng.integers(-50, 50, size=20)).float()
    phi = torch.from_numpy(rng.integers(-50, 50, size=(clients, 20))).float()
    votes = [Vote(1.0, {"weight": row - w}) for row in phi]
    task = small_task()
    closed = w + Gaussian(precision).shift({"weight": w}, votes, task)["weight"]
    ascent = Gaussian(precision).ascent({"weight": w}, votes, task)["weight"]
    total = precision * (phi - w).sum(dim=0)
    assert torch.equal(ascent * clients * precision, total)
    assert torch.equal(closed, w + total / (precision * clients))
    assert torch.equal(closed, phi.mean(dim=0))
    stepped, _ = ServerOptimizer("sgd", lr=1.0).step({"weight": w}, {"weight": ascent}, {})
    assert torch.equal(stepped["weight"], closed)


@pytest.mark.parametrize(("precision", "tau"), [(1.0, 1.0), (0.3, 4.0), (7.0, 0.2)])
def test_fisher_identity_in_the_conjugate_model(precision: float, tau: float) -> None:
    # φ_s ~ N(w, 1/λ), x_s ~ N(φ_s, 1/τ): one gradient M-step under the exact posterior is gradient ascent on the
    # marginal likelihood Σ_s log N(x_s; w, 1/λ + 1/τ).
    w = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([-1.0, 0.4, 2.0, 5.5], dtype=torch.float64)
    marginal = torch.distributions.Normal(w, math.sqrt(1 / precision + 1 / tau)).log_prob(x).sum()
    (expected,) = torch.autograd.grad(marginal, w)
    centre = {"weight": w.detach()}
    posterior_means = (precision * w.detach() + tau * x) / (precision + tau)
    votes = [Vote(1.0, {"weight": mean - centre["weight"]}) for mean in posterior_means]
    direction = Gaussian(precision).ascent(centre, votes, one_task(tau))["weight"]
    torch.testing.assert_close(precision * len(x) * direction, expected, rtol=1e-12, atol=0.0)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Gaussian, lambda mu: fedprox(mu=mu), lambda mu: fedopt(mu=mu)])
@pytest.mark.parametrize("precision", [-0.1, math.nan, math.inf])
def test_a_precision_that_is_none(make: Callable[[float], object], precision: float) -> None:
    with pytest.raises(ConfigError, match=f"precision of a Gaussian prior must be finite and ≥ 0, got {precision}"):
        make(precision)
