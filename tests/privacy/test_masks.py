"""`MaskPrivacy`: what a mask method is handed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from laconic.core import ConfigError, Key, Registry, resolved_settings
from laconic.privacy import MaskPrivacy, draw, response

KEY = Key.from_seed(0)


def test_given_noise_is_used_as_it_is() -> None:
    privacy = MaskPrivacy(c=0.2, sigma=0.5)
    assert privacy.bind(7).sigma == 0.5
    assert privacy.bind(7).dimensions == 7
    assert privacy.dimensions is None


@pytest.mark.parametrize("calibration", ["mask", "analytic", "rdp", "classical"])
def test_a_budget_is_kept(calibration: Any) -> None:
    privacy = MaskPrivacy(c=0.2, epsilon=0.9, delta=1e-4, calibration=calibration).bind(5)
    spent = privacy.spent(1)
    assert spent.epsilon <= 0.9 * (1 + 1e-9)
    if calibration == "mask":
        assert spent.epsilon == pytest.approx(0.9, abs=1e-6)
    else:
        assert spent.unamplified <= 0.9 * (1 + 1e-9)
    if calibration == "analytic":
        assert spent.unamplified == pytest.approx(0.9, abs=1e-9)


def test_tighter_arguments_need_less_noise() -> None:
    def noise(calibration: Any) -> float:
        sigma = MaskPrivacy(c=0.2, epsilon=0.9, delta=1e-4, calibration=calibration).bind(5).sigma
        assert sigma is not None
        return sigma

    assert noise("mask") < noise("analytic") < noise("rdp")
    assert noise("analytic") < noise("classical")


def test_drawing_bits_may_be_enough() -> None:
    privacy = MaskPrivacy(c=0.2, epsilon=7.0, delta=1e-4, calibration="mask").bind(5)
    assert privacy.sigma == 0  # 5 ln 4 = 6.93
    assert privacy.spent(1).epsilon <= 5 * math.log(4)
    assert privacy.spent(1).unamplified == math.inf
    theta = torch.rand(5, generator=KEY.torch())
    assert torch.equal(privacy.randomize(theta, KEY), privacy.clip(theta))


def test_what_is_spent_grows_with_rounds_and_stays_in_order() -> None:
    privacy = MaskPrivacy(c=0.2, sigma=1.0, delta=1e-5).bind(50)
    spent = [privacy.spent(rounds) for rounds in (1, 2, 10)]
    assert [each.rounds for each in spent] == [1, 2, 10]
    assert spent[0].epsilon < spent[1].epsilon < spent[2].epsilon
    for each in spent:
        assert each.delta == 1e-5
        assert each.epsilon <= each.amplified
        assert each.epsilon <= each.unamplified


def test_amplification_caps_what_the_paper_counts() -> None:
    privacy = MaskPrivacy(c=0.2, sigma=0.05, delta=1e-4).bind(5)
    spent = privacy.spent(1)
    assert spent.amplified <= 5 * math.log(4) + 0.01 < spent.unamplified


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_way_of_a_mask(dtype: torch.dtype) -> None:
    """Client to server and back: unbiased for clients that share θ, biased where correction is off."""
    clients, privacy = 200_000, MaskPrivacy(c=0.2, sigma=0.5).bind(2)
    theta = torch.tensor([0.3, 0.75], dtype=dtype)
    noisy = privacy.randomize(theta.expand(clients, 2), KEY.fold_in("noise"))
    mean = draw(noisy, KEY.fold_in("bits")).to(dtype).mean(dim=0)
    corrected = privacy.corrected(mean)
    assert corrected.dtype is dtype
    assert corrected.tolist() == pytest.approx(theta.tolist(), abs=0.012)
    biased = MaskPrivacy(c=0.2, sigma=0.5, correct_bias=False).corrected(mean)
    assert biased.tolist() == pytest.approx(response(theta, c=0.2, sigma=0.5).tolist(), abs=0.005)
    assert abs(float(biased[0]) - 0.3) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_server_makes_of_masks_stays_in_the_interval(dtype: torch.dtype) -> None:
    privacy = MaskPrivacy(c=0.01, sigma=0.5)
    means = torch.linspace(0, 1, 11, dtype=dtype)
    for each in (privacy, MaskPrivacy(c=0.01, sigma=0.5, correct_bias=False)):
        found = each.corrected(means)
        assert torch.equal(found, each.clip(found))
        assert bool((found.diff() >= 0).all())
        assert float(found[5]) == 0.5


def test_too_much_noise_to_correct() -> None:
    means = torch.tensor([0.4])
    gated = MaskPrivacy(c=0.2, sigma=2.0, sigma_max=1.0)
    assert gated.corrected(means).tolist() == means.tolist()
    assert MaskPrivacy(c=0.2, sigma=1.0, sigma_max=1.0).corrected(means).tolist() != means.tolist()


def test_randomness_is_the_key() -> None:
    privacy, theta = MaskPrivacy(c=0.2, sigma=0.5), torch.full((20,), 0.4)
    assert torch.equal(privacy.randomize(theta, KEY), privacy.randomize(theta, KEY))
    assert not torch.equal(privacy.randomize(theta, KEY), privacy.randomize(theta, KEY.fold_in(1)))


def test_it_is_a_table_of_settings() -> None:
    def method(*, privacy: MaskPrivacy | None = None) -> MaskPrivacy | None:
        """A method."""
        return privacy

    registry = Registry("method", [method])
    assert registry.build("method", {"privacy": {"c": 0.2, "sigma": 0.5}}) == MaskPrivacy(c=0.2, sigma=0.5)
    assert registry.build("method", {}) is None
    with pytest.raises(ConfigError, match=r"unknown key 'sigmaa'; did you mean 'sigma'"):
        registry.build("method", {"privacy": {"c": 0.2, "sigmaa": 0.5}})
    with pytest.raises(ConfigError, match=r"c must lie strictly between 0 and 0.5, got 0.5"):
        registry.build("method", {"privacy": {"c": 0.5, "sigma": 0.5}})
    written = resolved_settings(method, {"privacy": {"c": 0.2, "sigma": 0.5}})["privacy"]
    assert written["delta"] == 1e-5
    assert registry.build("method", {"privacy": written}) == MaskPrivacy(c=0.2, sigma=0.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"c": 0.0, "sigma": 0.5}, "c must lie strictly between 0 and 0.5, got 0.0"),
        ({"c": 0.5, "sigma": 0.5}, "c must lie strictly between 0 and 0.5, got 0.5"),
        ({"c": 0.2}, "give sigma .* or epsilon"),
        ({"c": 0.2, "sigma": 0.5, "epsilon": 1.0}, "not both"),
        ({"c": 0.2, "sigma": -0.5}, "sigma must be finite and ≥ 0, got -0.5"),
        ({"c": 0.2, "epsilon": 0.0}, "epsilon must be finite and > 0, got 0.0"),
        ({"c": 0.2, "sigma": 0.5, "delta": 0.0}, "delta must lie strictly between 0 and 1, got 0.0"),
        ({"c": 0.2, "sigma": 0.5, "delta": 1.0}, "delta must lie strictly between 0 and 1, got 1.0"),
        ({"c": 0.2, "sigma": 0.5, "calibration": "best"}, "calibration must be .* got 'best'"),
        ({"c": 0.2, "sigma": 0.5, "sigma_max": -1.0}, "sigma must be finite and ≥ 0, got -1.0"),
        ({"c": 0.2, "epsilon": 2.0, "calibration": "classical"}, "proven for epsilon < 1 only, got 2.0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MaskPrivacy(**settings)


def test_uses_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="dimensions must be at least 1, got 0"):
        MaskPrivacy(c=0.2, sigma=0.5).bind(0)
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        MaskPrivacy(c=0.2, sigma=0.5).bind(5).spent(0)
    for use in (
        lambda: MaskPrivacy(c=0.2, sigma=0.5).spent(1),
        lambda: MaskPrivacy(c=0.2, epsilon=1.0).randomize(torch.tensor([0.5]), KEY),
        lambda: MaskPrivacy(c=0.2, epsilon=1.0).corrected(torch.tensor([0.5])),
    ):
        with pytest.raises(RuntimeError, match=r"call bind\(dimensions\) first"):
            use()
