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

_aten = torch.ops.aten


class Chain(NamedTuple):
    """Linear layers with ReLUs between them."""

    layers: Sequence[nn.Linear]

    @classmethod
    def of(cls, task: Task, module: nn.Module, part: Part) -> Chain | None:
        """The chain that a task trains, if it is one and nothing but the cross-entropy of its outputs is wanted."""
        if task.loss is not F.cross_entropy or task.side is not None or task.precision != "float32":
            return None
        if part.y.dtype != torch.int64 or part.y.ndim != 1 or part.x.dtype != torch.float32:
            return None
        if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
            return None
        kinds = [layer for layer in module if not _flattens(layer)]
        linear, between = kinds[::2], kinds[1::2]
        plain = all(type(a) is nn.Linear and a.bias is not None for a in linear)
        plain = plain and all(type(b) is nn.ReLU and not b.inplace for b in between) and len(kinds) % 2 == 1
        first = next(iter(module), None)
        hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in module)
        return cls(linear) if plain and not hooked and first is not None and _flattens(first) else None  # type: ignore[arg-type]

    @torch.no_grad()
    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The mean loss of a mini-batch, and its gradient by every parameter, by the parameter's id."""
        inputs, h = [], x.flatten(1)
        for number, layer in enumerate(self.layers):
            inputs.append(h)
            h = torch.addmm(layer.bias, h, layer.weight.t())
            h = torch.relu(h) if number < len(self.layers) - 1 else h
        log = torch.log_softmax(h, 1)
        loss, weight = _aten.nll_loss_forward(log, y, None, 1, -100)
        slope = _aten.nll_loss_backward(torch.ones_like(loss), log, y, None, 1, -100, weight)
        slope = _aten._log_softmax_backward_data(slope, log, 1, log.dtype)
        found: dict[int, Tensor] = {}
        for layer, before in zip(reversed(self.layers), reversed(inputs), strict=True):
            found[id(layer.weight)], found[id(layer.bias)] = slope.t().mm(before), slope.sum(0)
            if before is not inputs[0]:
                slope = _aten.threshold_backward(slope.mm(layer.weight), before, 0)
        return loss, found


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1
