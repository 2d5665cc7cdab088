"""Several models that predict as one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """Predicts with the mean of its members: of their probabilities, or of their outputs as they are."""

    def __init__(self, members: list[nn.Module], *, probabilities: bool = True) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.probabilities = probabilities

    def forward(self, x: Tensor) -> Tensor:
        """Log of the mean probability (which serves as logits), or the mean output."""
        outputs = torch.stack(list(self._outputs(x)))
        if not self.probabilities:
            return outputs.mean(dim=0)
        return outputs.log_softmax(dim=-1).logsumexp(dim=0) - torch.tensor(float(len(self.members))).log()

    def _outputs(self, x: Tensor) -> Iterator[Tensor]:
        for member in self.members:
            yield member(x)
