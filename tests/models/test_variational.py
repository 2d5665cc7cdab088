"""Variational layers: surgery, noise, the KL and its gradient."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laconic.core import ConfigError, Key
from laconic.models import lenet5, resnet20_gn
from laconic.models.variational import kl, kl_gradient, log_alpha, pruned, sigma_name, variational


def _integrated(log_alpha: float) -> float:
    """KL(N(1, α) ‖ c/|w|) by quadrature, with the constant that makes it 0 for α → ∞.

    −H(q) + E log|w| = −½ log(2πeα) + E log|1 + √α ε|; for α → ∞ that tends to E log|ε| − ½ log(2πe).
    The singularity of the logarithm is integrable: the substitution w = ±e^t takes it away.
    """
    sd = math.exp(log_alpha / 2)
    t = np.linspace(-60, math.log(1 + 40 * sd) + 1, 60_001)

    def expected_log(mean: float) -> float:
        w = np.exp(t)
        density = np.exp(-((w - mean) ** 2) / (2 * sd**2)) + np.exp(-((w + mean) ** 2) / (2 * sd**2))
        return float(np.trapezoid(t * density * w, t)) / (sd * math.sqrt(2 * math.pi))

    return expected_log(1.0) - expected_log(0.0)


def test_the_kl_is_as_near_to_the_integral_as_its_constants_allow() -> None:
    """The largest error on [−6, 4] is 0.00937, at −3.5. (At whole numbers it stays below 0.009.)"""
    points = np.linspace(-6, 4, 21)
    approximate = kl(torch.from_numpy(points))
    errors = {x: abs(float(a) - _integrated(x)) for a, x in zip(approximate, points.tolist(), strict=True)}
    assert max(errors, key=lambda x: errors[x]) == -3.5
    assert max(errors.values()) == pytest.approx(0.009374, abs=2e-6)
    assert max(error for x, error in errors.items() if x == round(x)) <= 0.009


def test_the_kl_falls_to_zero() -> None:
    values = kl(torch.linspace(-8, 8, 200, dtype=torch.float64))
    assert bool((values.diff() < 0).all())
    assert float(kl(torch.tensor(30.0))) == pytest.approx(0, abs=1e-6)
    assert float(kl(torch.tensor(3.0))) == pytest.approx(0.0254, abs=5e-5)


def test_the_gradient_of_the_kl_is_that_of_autograd() -> None:
    theta = torch.tensor([0.3, -0.02, 1e-3, 1e-5, 0.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor([-4.0, -9.0, -12.0, -14.0, -10.0, -9.5, 1.0], dtype=torch.float64, requires_grad=True)
    free = log_alpha(theta.detach(), sigma.detach())
    assert float(free.min()) == -8
    assert float(free.max()) == 8  # both ends of the clip are met
    clipped = (sigma - torch.log(theta**2 + 1e-8)).clamp(-8, 8)
    expected = torch.autograd.grad(kl(clipped).sum(), [theta, sigma])
    for mine, its in zip(kl_gradient(theta.detach(), sigma.detach()), expected, strict=True):
        torch.testing.assert_close(mine, its)


def test_log_alpha_is_finite_at_zero() -> None:
    assert log_alpha(torch.zeros(3), torch.tensor([-10.0, -30.0, 5.0])).isfinite().all()
    unclipped = -14 - math.log(1e-4 + 1e-8)
    assert float(log_alpha(torch.tensor(1e-2), torch.tensor(-14.0))) == pytest.approx(unclipped, rel=1e-5)


def _sampled(layer: nn.Module, x: Tensor, draws: int) -> Tensor:
    """Outputs of explicitly drawn weights, the same for every example of a draw."""
    generator = Key.from_seed(1).torch()
    plain: list[Tensor] = []
    theta, sd = layer.weight.detach(), (layer.log_sigma2.detach() / 2).exp()
    for _ in range(draws):
        weight = theta + sd * torch.randn(theta.shape, generator=generator)
        if isinstance(layer, nn.Linear):
            plain.append(nn.functional.linear(x, weight, layer.bias))
        else:
            plain.append(layer._conv_forward(x, weight, layer.bias))
    return torch.stack(plain)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 3), (2, 5)),
        (nn.Conv1d(2, 3, 3, padding=1), (2, 2, 6)),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="reflect"), (2, 2, 6, 6)),
        (nn.Conv2d(4, 4, 3, groups=2, bias=False), (2, 4, 5, 5)),
    ],
)
def test_outputs_have_the_mean_and_the_variance_of_drawn_weights(layer: nn.Module, shape: tuple[int, ...]) -> None:
    form = variational(layer, first_log_sigma2=-2.0)
    x = torch.randn(shape, generator=Key.from_seed(2).torch())
    draws = 1500
    form.noise.generator = Key.from_seed(3).torch()
    with torch.no_grad():
        mine = form.module(x.repeat(draws, *[1] * (x.dim() - 1))).unflatten(0, (draws, len(x)))
        drawn = _sampled(layer, x, draws)
        form.noise.generator = None
        mean = form.module(x)
    sd = drawn.std(dim=0)
    assert float(((mine.mean(dim=0) - mean) / sd).abs().max()) < 5 / math.sqrt(draws)
    assert float((mine.std(dim=0) / sd - 1).abs().max()) < 0.12  # either is off by 2 % on average
    assert float(sd.min()) > 0.05


def test_noise_is_a_function_of_its_generator() -> None:
    form = variational(nn.Linear(4, 4))
    x = torch.ones(2, 4)
    outputs = []
    for seed in (1, 1, 2):
        form.noise.generator = Key.from_seed(seed).torch()
        before = torch.random.get_rng_state()
        outputs.append(form.module(x))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_surgery_keeps_names_and_leaves_all_else_ordinary() -> None:
    plain, module = resnet20_gn((3, 32, 32), 10), resnet20_gn((3, 32, 32), 10)
    form = variational(module)
    names = [name for name, _ in plain.named_parameters()]
    assert [n for n, _ in form.module.named_parameters() if not n.endswith("log_sigma2")] == names
    layers = [n for n, layer in plain.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    assert list(form.weights) == [f"{name}.weight" for name in layers]
    assert sum("log_sigma2" in name for name, _ in form.module.named_parameters()) == len(layers)
    assert form.module(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_layer_that_appears_twice_is_one() -> None:
    layer = nn.Linear(3, 3)
    form = variational(nn.Sequential(layer, nn.ReLU(), layer))
    assert form.weights == ("0.weight",)


def test_frozen_layers_stay_ordinary() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    assert variational(module).weights == ("1.weight",)


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.fc = nn.Linear(2, 2)


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    ("module", "whole", "reason"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), ["1"], "it is a LSTM"),
        (nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)), ["0"], "it is a Embedding"),
        (nn.Sequential(nn.Linear(2, 2), nn.Conv3d(1, 1, 1)), ["1"], "it is a Conv3d"),
        (_Own(), [""], "it is a _Own"),
        (nn.Sequential(nn.Linear(3, 3), _tied()), ["1.0", "1.1"], "whose weight is used elsewhere"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
            *(["1", "1.parametrizations.weight"], "ParametrizedLinear"),
        ),
        (nn.Sequential(nn.Linear(2, 2), type("Own", (nn.Linear,), {})(2, 2)), ["1"], "it is a Own"),
    ],
)
def test_what_has_no_variational_form_stays_as_it_is(module: nn.Module, whole: list[str], reason: str) -> None:
    before, again = [type(layer) for layer in module.modules()], copy.deepcopy(module)
    form = variational(module)
    assert list(form.whole) == whole
    assert reason in form.whole[whole[0]]
    assert form.weights
    for name, kind in zip((name for name, _ in module.named_modules()), before, strict=False):
        assert name not in whole or type(module.get_submodule(name)) is kind
    assert not variational(again, dense=[f"{name}.*" if name else "scale" for name in whole]).whole


def test_a_model_with_nothing_to_treat_is_refused() -> None:
    with pytest.raises(ConfigError, match="this has none"):
        variational(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)))


def test_pruned_weights_load_into_the_original_architecture() -> None:
    plain = lenet5((1, 28, 28), 10)
    state = {name: p.detach() for name, p in plain.named_parameters()}
    keep = {name: torch.rand(state[name].shape, generator=Key.from_seed(0).torch()) < 0.1 for name in ("fc1.weight",)}
    plain.load_state_dict(pruned(state, keep))
    assert int((plain.fc1.weight != 0).sum()) == int(keep["fc1.weight"].sum())
    assert all(torch.equal(a, b) for (n, a), b in zip(state.items(), plain.parameters(), strict=True) if n not in keep)


def test_names_of_sigmas() -> None:
    assert [sigma_name(n) for n in ("weight", "a.b.weight")] == ["log_sigma2", "a.b.log_sigma2"]
    assert len(set(itertools.chain(variational(nn.Linear(2, 2)).weights))) == 1
