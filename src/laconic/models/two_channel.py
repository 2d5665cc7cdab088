"""Questions about images: two channels, one for the image and one for the question, and a fusion of both.

An input is one vector: the pixels of an image, then the numbers of the question's words (0 for none), because a
federation's inputs are one tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from laconic.core import ConfigError
from laconic.models.shapes import flat_size


def vqa(
    shape: tuple[int, ...],
    classes: int,
    *,
    words: int = 16,
    vocabulary: int = 64,
    embedding: int = 300,
    hidden: int = 512,
    features: int = 1000,
    joint: int = 1024,
    width: int = 32,
) -> nn.Module:
    """Two-channel network of LG-FedAvg (Liang et al., 2020): the fusion has 5,149,200 parameters for 1,000 answers.

    `image.*` is a small convolutional encoder in the place of the paper's ResNet-18, `question.*` an embedding and an
    LSTM of two layers; with `private = ["image.*", "question.*"]` only `fusion.*` is shared.
    """
    values = flat_size("vqa", shape, classes) - words
    side = math.isqrt(max(0, values) // 3)
    if len(shape) != 1 or 3 * side * side != values or side < 8:
        raise ConfigError(
            f"model 'vqa' got inputs of shape {shape}, but it needs the pixels of a square colour image of at least "
            f"8×8 pixels and the numbers of {words} words; set words to the length of the questions."
        )
    if min(words, vocabulary, embedding, hidden, features, joint, width) < 1:
        raise ConfigError("[model] vqa: every size must be at least 1.")
    return Vqa(
        side,
        ImageEncoder(features, width),
        QuestionEncoder(vocabulary, embedding, hidden),
        Fusion(features, 4 * hidden, joint, classes),
    )


class Vqa(nn.Module):
    """Both channels and their fusion."""

    def __init__(self, side: int, image: ImageEncoder, question: QuestionEncoder, fusion: Fusion) -> None:
        super().__init__()
        self.side, self.image, self.question, self.fusion = side, image, question, fusion

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the answers."""
        pixels = 3 * self.side * self.side
        image = x[:, :pixels].view(-1, 3, self.side, self.side)
        answer: Tensor = self.fusion(self.image(image), self.question(x[:, pixels:].long()))
        return answer


class ImageEncoder(nn.Module):
    """Three convolutions, a global maximum, and a linear layer."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width, features)

    def forward(self, x: Tensor) -> Tensor:
        """The image's features."""
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        features: Tensor = self.fc(self.conv3(x).relu().amax(dim=(2, 3)))
        return features


class QuestionEncoder(nn.Module):
    """An embedding and an LSTM of two layers; h and c of both layers, side by side."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """The question's features; states are taken after each question's own last word."""
        # Numbers that the vocabulary does not have mean "some word".
        words = words.clamp(0, self.embedding.num_embeddings - 1)
        places = torch.arange(1, words.shape[1] + 1, device=words.device)
        lengths = ((words > 0) * places).amax(dim=1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(words).tanh(), lengths, batch_first=True, enforce_sorted=False
        )
        _, (h, c) = self.lstm(packed)
        return torch.cat([h, c]).transpose(0, 1).flatten(1)


class Fusion(nn.Module):
    """Both features in one space, multiplied; two layers to the answers."""

    def __init__(self, image: int, question: int, joint: int, classes: int) -> None:
        super().__init__()
        self.image = nn.Linear(image, joint)
        self.question = nn.Linear(question, joint)
        self.fc1 = nn.Linear(joint, classes)
        self.fc2 = nn.Linear(classes, classes)

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        """Logits of the answers."""
        fused = self.image(image).tanh() * self.question(question).tanh()
        answer: Tensor = self.fc2(self.fc1(fused).tanh())
        return answer
