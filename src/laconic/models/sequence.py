"""Networks for sequences of tokens: whole numbers in, a class for every place out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import ConfigError
from laconic.models.shapes import check_outputs


class NextToken(nn.Module):
    """An embedding, LSTM layers, and linear layers that say for every place which token comes next."""

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, width) if width else None
        self.head = nn.Linear(width or hidden, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token at every place: (examples, places, tokens)."""
        h = self.lstm(self.embed(x))[0]
        logits: Tensor = self.head(h if self.fc is None else F.relu(self.fc(h)))
        return logits


def char_lstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    embedding: int = 8,
    hidden: int = 128,
    layers: int = 1,
    width: int = 128,
) -> nn.Module:
    """Next character: an embedding, `layers` of LSTM, a hidden linear layer of `width` (0: none) and the output.

    With `hidden = 256, layers = 2, width = 0` it is the network that LEAF uses for Shakespeare.

    >>> net = char_lstm((80,), 90, hidden=256, layers=2, width=0)
    >>> sum(p.numel() for p in net.parameters())
    822570
    """
    check_outputs("char_lstm", classes)
    if len(shape) != 1:
        raise ConfigError(
            f"model 'char_lstm' got inputs of shape {shape}, but it needs sequences of tokens, (length,)."
        )
    for name, value, least in (("embedding", embedding, 1), ("hidden", hidden, 1), ("layers", layers, 1)):
        if value < least:
            raise ConfigError(f"char_lstm.{name} must be at least {least}, got {value}.")
    if width < 0:
        raise ConfigError(f"char_lstm.width must not be negative, got {width}.")
    return NextToken(classes, embedding, hidden, layers, width)
