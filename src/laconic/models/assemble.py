"""From a model's compact form to the model, and from a method to that form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from laconic.core import (
    Artifact,
    Bound,
    ConfigError,
    Leaf,
    PayloadError,
    Spec,
    Task,
    Tree,
    read_state,
    spec_of,
    subtree,
    write_state,
)
from laconic.models.anatomy import dissect
from laconic.models.ensemble import Ensemble
from laconic.models.frozen import SCALES, signed_constants
from laconic.models.surgery import plan, sliced

UNITS = "#units"
"""The leaf that says which units of the whole model are left."""
_MOST_MEMBERS = 1000

Settings = Mapping[str, int | float | str]


def artifact_of(method: Bound, server: Tree) -> Artifact | None:
    """The server's model in its most compact form; `None` where it is a module that only the method itself can make."""
    if method.artifact is not None:
        return method.artifact(server)
    return weights_of(method.global_model(server), method.task)


def weights_of(model: nn.Module, task: Task) -> Artifact | None:
    """A model as weights of the task's architecture, or of several; `None` where it is another module."""
    if isinstance(model, Ensemble):
        states = [read_state(member) for member in model.members]
        tree = {f"{k}/{name}": leaf for k, state in enumerate(states) for name, leaf in state.items()}
        settings = {"members": len(states), "outputs": "logits" if model.probabilities else "values"}
        return Artifact("members", tree, settings) if spec_of(states[0]) == _plain(task.spec) else None
    state = read_state(model)
    return Artifact("weights", state) if spec_of(state) == _plain(task.spec) else None


def bit_spec(module: nn.Module, kind: str, settings: Settings) -> Spec:
    """The leaves of bits that the compact form of a model has: what a reader must know first."""
    if kind == "units":
        units = sum(layer.units for layer in dissect(module).layers)
        return {UNITS: Leaf((units,), torch.bool)}
    if kind in ("mask", "masks"):
        one = {name: Leaf(leaf.shape, torch.bool) for name, leaf in spec_of(read_state(module)).items()}
        return one if kind == "mask" else _of_each(one, settings)
    return {}


def value_spec(module: nn.Module, kind: str, settings: Settings, bits: Tree) -> Spec:
    """The leaves of values that it has, once its bits are known."""
    if kind == "weights":
        return spec_of(read_state(module))
    if kind == "units":
        return spec_of(read_state(_smaller(module, bits)))
    if kind == "members":
        return _of_each(spec_of(read_state(module)), settings)
    return {}


def assemble(build: Callable[[], nn.Module], artifact: Artifact) -> nn.Module:
    """The model, ready to predict. `build` makes the whole architecture, weights undefined.

    >>> net = nn.Linear(2, 1)
    >>> copy = assemble(lambda: nn.Linear(2, 1), Artifact("weights", read_state(net)))
    >>> bool((copy(torch.ones(1, 2)) == net(torch.ones(1, 2))).all())
    True
    """
    if artifact.kind not in KINDS:
        raise PayloadError("kind", f"a model of kind {artifact.kind!r}; this version knows {', '.join(KINDS)}")
    return KINDS[artifact.kind](build, artifact).eval()


def _weights(build: Callable[[], nn.Module], artifact: Artifact) -> nn.Module:
    module = build()
    write_state(module, artifact.tree)
    return module


def _units(build: Callable[[], nn.Module], artifact: Artifact) -> nn.Module:
    module = _smaller(build(), artifact.tree)
    write_state(module, artifact.tree)
    return module


def _ensemble(
    member: Callable[[Callable[[], nn.Module], Artifact], nn.Module], build: Callable[[], nn.Module], artifact: Artifact
) -> nn.Module:
    numbers, settings = range(_members(artifact.settings)), artifact.settings
    members = [member(build, replace(artifact, tree=subtree(str(k), artifact.tree))) for k in numbers]
    return Ensemble(members, probabilities=settings.get("outputs") == "logits")


def _masked(build: Callable[[], nn.Module], artifact: Artifact) -> nn.Module:
    module = build()
    seed, scale = artifact.settings.get("seed"), artifact.settings.get("scale")
    if type(seed) is not int or not 0 <= seed < 2**64 or scale not in SCALES:
        raise PayloadError("settings", f"a mask of weights from the seed {seed!r} with the scale {scale!r}")
    try:
        frozen = signed_constants(module, seed, scale)
    except ConfigError as error:
        raise PayloadError("model", f"the file's model cannot be masked: {error}") from None
    write_state(module, {name: torch.where(artifact.tree[name], leaf, 0.0) for name, leaf in frozen.items()})
    return module


KINDS: Mapping[str, Callable[[Callable[[], nn.Module], Artifact], nn.Module]] = {
    "weights": _weights,
    "units": _units,
    "mask": _masked,
    "members": partial(_ensemble, _weights),
    "masks": partial(_ensemble, _masked),
}
"""How a model is made of each kind of compact form."""


def _smaller(module: nn.Module, bits: Tree) -> nn.Module:
    anatomy = dissect(module)
    return sliced(module, anatomy, plan(anatomy, bits[UNITS]))


def _of_each(one: Spec, settings: Settings) -> Spec:
    """The leaves of every member of an ensemble."""
    return {f"{k}/{name}": leaf for k in range(_members(settings)) for name, leaf in one.items()}


def _members(settings: Settings) -> int:
    members = settings.get("members")
    if not isinstance(members, int) or not 1 <= members <= _MOST_MEMBERS:
        raise PayloadError("members", f"an ensemble of {members!r} members; 1 to {_MOST_MEMBERS} are possible")
    return members


def _plain(spec: Spec) -> Spec:
    return {name: Leaf(leaf.shape, leaf.dtype) for name, leaf in spec.items()}
