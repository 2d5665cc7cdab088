"""easy-VQA: questions about simple shapes, from the package `easy-vqa` (extra `vqa`)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.core import DataError
from laconic.data.federation import Federation, pooled
from laconic.data.holdout import check_limit
from laconic.data.images import scale
from laconic.data.partition import PartitionSpec

_WORD = re.compile(r"[a-z]+")


def easy_vqa(
    *,
    clients: int = 50,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    size: int = 16,
    words: int = 16,
) -> Federation:
    """easy-VQA: 38,575 + 9,673 questions about coloured shapes, 13 answers (install the extra `vqa`).

    An input is the pixels of an image of `size` × `size`, then the numbers of the question's first `words` words, for
    the model `vqa`. Words are numbered in the order of the alphabet, from 1 on; the vocabulary is that of the training
    questions.
    """
    check_limit(limit, "easy_vqa")
    if size < 8 or words < 1:
        raise DataError(f"easy_vqa: size must be at least 8 and words at least 1, got {size} and {words}.")
    try:
        package: Any = importlib.import_module("easy_vqa")
        image: Any = importlib.import_module("PIL.Image")
    except ImportError:
        raise DataError('easy_vqa needs the package easy-vqa; run: pip install "laconic[vqa]"') from None
    train, test = package.get_train_questions(), package.get_test_questions()
    answers = {answer: number for number, answer in enumerate(sorted(package.get_answers()))}
    numbers = vocabulary(train[0])

    def part(questions: Any, paths: dict[int, Any], most: int | None) -> tuple[Tensor, Tensor]:
        texts, said, shown = list(questions[0])[:most], list(questions[1])[:most], list(questions[2])[:most]
        pictures = {number: _picture(image, paths[number], size) for number in sorted(set(shown))}
        pixels = scale(np.stack([pictures[number] for number in shown]), "symmetric").flatten(1)
        asked = torch.tensor([tokens(text, numbers, words) for text in texts], dtype=torch.float32)
        return torch.cat([pixels, asked], dim=1), torch.tensor([answers[answer] for answer in said])

    x, y = part(train, package.get_train_image_paths(), limit)
    test_x, test_y = part(test, package.get_test_image_paths(), None)
    return pooled(
        "easy_vqa",
        torch.cat([x, test_x]),
        torch.cat([y, test_y]),
        num_train=len(x),
        clients=clients,
        partition=partition,
        seed=seed,
        classes=len(answers),
    )


def vocabulary(questions: Sequence[str]) -> dict[str, int]:
    """Words by number, from 1 on.

    >>> vocabulary(["Is it red?", "What is it?"])
    {'is': 1, 'it': 2, 'red': 3, 'what': 4}
    """
    found = sorted({word for question in questions for word in _WORD.findall(question.lower())})
    return {word: number for number, word in enumerate(found, 1)}


def tokens(question: str, numbers: dict[str, int], words: int) -> list[int]:
    """The numbers of a question's words, filled up with 0; a word that is not known is left out.

    >>> tokens("Is it not red?", {"is": 1, "it": 2, "red": 3}, 4)
    [1, 2, 3, 0]
    """
    known = [numbers[word] for word in _WORD.findall(question.lower()) if word in numbers][:words]
    return known + [0] * (words - len(known))


def _picture(image: Any, path: Any, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with image.open(path) as opened:
        return np.asarray(opened.convert("RGB").resize((size, size))).transpose(2, 0, 1)
