"""Masks that leave a device under differential privacy: a wrapper of a method that sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laconic.core import ALONE, Bound, Method, Population, Task, Tree, num_values
from laconic.methods.bernoulli_mask import BernoulliMask, Release
from laconic.privacy import MaskPrivacy


def private_masks(masks: BernoulliMask, privacy: MaskPrivacy) -> Method:
    """The same method with masks drawn from clipped and noisy probabilities (see `laconic.privacy`).

    θ is what the mechanism's mean leads back to, and evaluations say what one round costs a client.
    """

    def bind(task: Task, population: Population = ALONE) -> Bound:
        private = privacy.bind(num_values(task.spec))
        bound = replace(masks, release=Release(private.randomize, private.corrected)).bind(task, population)

        def metrics(server: Tree) -> Mapping[str, float]:
            return {**bound.metrics(server), "epsilon_per_round": private.spent(1).epsilon}

        return replace(bound, metrics=metrics, secret_draws=True)

    return Method(masks.name, {}, bind, masks.link)
