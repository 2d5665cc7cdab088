"""Gradients of plain networks without autograd: the same operations in the same order, so the same bits, in less time.

A step of a small network is bound by the calls that it makes, not by its arithmetic. A chain of linear layers and ReLUs
under the cross-entropy needs a third of autograd's calls when its gradient is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import Part, Task
from laconic.models.order import hooked

_aten = torch.ops.aten


class _Linear(NamedTuple):
    """A layer's own tensors, looked up once for all steps."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor


class Chain(NamedTuple):
    """Linear layers with ReLUs between them, and which of their gradients are wanted, counted from the last layer."""

    layers: Sequence[_Linear]
    wanted: Sequence[int]
    one: Tensor

    @classmethod
    def of(cls, task: Task, module: nn.Module, part: Part, weights: Sequence[Tensor]) -> Chain | None:
        """The chain that a task trains, if it is one and nothing but the cross-entropy of its outputs is wanted."""
        if task.loss is not F.cross_entropy or task.side is not None or task.precision != "float32":
            return None
        if part.y.dtype != torch.int64 or part.y.ndim != 1 or part.x.dtype != torch.float32:
            return None
        if type(module) is not nn.Sequential or hooked(module):
            return None
        kinds = [layer for layer in module if not _flattens(layer)]
        linear, between = kinds[::2], kinds[1::2]
        plain = all(type(a) is nn.Linear and a.bias is not None for a in linear)
        plain = plain and all(type(b) is nn.ReLU and not b.inplace for b in between) and len(kinds) % 2 == 1
        first = next(iter(module), None)
        if not plain or any(map(hooked, module)) or first is None or not _flattens(first):
            return None
        layers = [_Linear(a.weight, a.weight.t(), a.bias) for a in linear if isinstance(a, nn.Linear)]
        found = [id(leaf) for layer in reversed(layers) for leaf in (layer.weight, layer.bias)]
        if len({*found}) < len(found):  # tied weights: their gradients add up
            return None
        return cls(layers, [found.index(id(leaf)) for leaf in weights], torch.ones((), device=task.device))

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a mini-batch, and its gradient by every weight that is wanted. Without autograd's eye."""
        inputs, h, last = [], x.flatten(1), self.layers[-1]
        for layer in self.layers:
            inputs.append(h)
            h = torch.addmm(layer.bias, h, layer.transposed)
            h = h if layer is last else torch.relu(h)
        log = torch.log_softmax(h, 1)
        loss, weight = _aten.nll_loss_forward(log, y, None, 1, -100)
        slope = _aten.nll_loss_backward(self.one, log, y, None, 1, -100, weight)
        slope = _aten._log_softmax_backward_data(slope, log, 1, log.dtype)
        found: list[Tensor] = []
        for layer, before in zip(reversed(self.layers), reversed(inputs), strict=True):
            found += [slope.t().mm(before), slope.sum(0)]
            if before is not inputs[0]:
                slope = _aten.threshold_backward(slope.mm(layer.weight), before, 0)
        return loss, [found[place] for place in self.wanted]


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1
