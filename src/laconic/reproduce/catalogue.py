"""Every recipe by name. A new one is a function from `Job` to `Outcome` and an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from laconic.reproduce import fedpm_privacy, lg_theory
from laconic.reproduce.recipe import Recipe

recipes: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (fedpm_privacy.recipe, lg_theory.recipe)}
"""All recipes."""
