from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from laconic.core import DataError
from laconic.data import easy_vqa


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Something that looks like the package easy-vqa, with four images."""
    colours = {0: (255, 0, 0), 1: (0, 255, 0), 2: (0, 0, 255), 3: (0, 0, 0)}
    for number, colour in colours.items():
        Image.fromarray(np.full((64, 64, 3), colour, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    questions = ["What colour is it?", "Is it red?", "Is there a triangle?", "Is it not blue?"]
    answers = ["red", "no", "yes", "no"]
    fake = ModuleType("easy_vqa")
    paths = {number: str(tmp_path / f"{number}.png") for number in colours}
    fake.get_train_questions = lambda: (questions * 3, answers * 3, [0, 1, 2, 3] * 3)  # type: ignore[attr-defined]
    fake.get_test_questions = lambda: (["Is it yellow?"], ["no"], [3])  # type: ignore[attr-defined]
    fake.get_train_image_paths = fake.get_test_image_paths = lambda: paths  # type: ignore[attr-defined]
    fake.get_answers = lambda: ["yes", "no", "red"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "easy_vqa", fake)
    return fake


@pytest.mark.usefixtures("package")
def test_an_input_is_an_image_and_a_question() -> None:
    data = easy_vqa(clients=2, size=8, words=6)
    assert data.shape == (3 * 64 + 6,)
    assert (data.classes, data.num_clients, len(data.train), len(data.test)) == (3, 2, 12, 1)
    x, y = data.x, data.y
    assert torch.equal(x[0, :64], torch.ones(64))  # red, scaled to [-1, 1]
    assert torch.equal(x[0, 64:192], -torch.ones(128))
    # a blue colour is it not red there triangle what, in the order of the alphabet from 1 on
    assert x[1, -6:].tolist() == [4, 5, 7, 0, 0, 0]
    assert x[-1, -6:].tolist() == [4, 5, 0, 0, 0, 0]  # "yellow" is not known
    assert y.tolist() == [1, 0, 2, 0] * 3 + [0]


@pytest.mark.usefixtures("package")
def test_a_trial_takes_the_first_questions() -> None:
    assert len(easy_vqa(clients=1, size=8, limit=3).train) == 3
    with pytest.raises(DataError, match="size must be at least 8"):
        easy_vqa(size=4)


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(DataError, match=r'easy_vqa needs the package easy-vqa; run: pip install "laconic\[vqa\]"'):
        easy_vqa()
