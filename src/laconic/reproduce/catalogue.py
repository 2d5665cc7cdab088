"""Every recipe by name. A new one is a function from `Job` to `Outcome`, or a list of configurations (`Training`)."""

from __future__ import annotations

from collections.abc import Mapping

from laconic.reproduce import baselines, fedpm, fedpm_privacy, fedsparse, lg_fedavg, lg_theory, vardrop
from laconic.reproduce.recipe import Recipe

recipes: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        *baselines.recipes,
        *fedsparse.recipes,
        *fedpm.recipes,
        fedpm_privacy.recipe,
        *vardrop.recipes,
        *lg_fedavg.recipes,
        lg_theory.recipe,
    )
}
"""All recipes."""
