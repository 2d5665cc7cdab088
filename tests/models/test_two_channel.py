from __future__ import annotations

import pytest
import torch

from laconic.core import ConfigError, Key, Task, isolated, num_values
from laconic.methods import lg_fedavg
from laconic.models import models

SMALL = {"words": 5, "vocabulary": 9, "embedding": 4, "hidden": 3, "features": 6, "joint": 7, "width": 2}
SHAPE = (3 * 8 * 8 + 5,)


def test_the_papers_global_part_has_5149200_parameters() -> None:
    task = Task(lambda: models.build("vqa", {"words": 4, "embedding": 2, "width": 1}, given=((3 * 64 + 4,), 1000)))
    method = lg_fedavg(private=("image.*", "question.*")).bind(task)
    assert num_values(method.message_spec({})) == 5_149_200
    assert {name.split(".")[0] for name in method.message_spec({})} == {"fusion"}


def test_it_answers_and_its_channels_matter() -> None:
    with isolated(Key.from_seed(0)):  # some first weights of a net this small are dead
        net = models.build("vqa", SMALL, given=(SHAPE, 4)).eval()
        x = torch.rand(3, *SHAPE)
    x[:, -5:] = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0])
    answers = net(x)
    assert answers.shape == (3, 4)
    asked, shown = x.clone(), x.clone()
    asked[:, -5] = 4.0
    shown[:, :64] = 0.0
    assert not torch.allclose(net(asked), answers)
    assert not torch.allclose(net(shown), answers)
    short = x[:1].clone()
    short[:, -4:] = 0.0
    together = net(torch.cat([x, short]))
    assert torch.allclose(together[:3], answers, atol=1e-6)  # who else is in a batch does not matter
    assert torch.allclose(together[3:], net(short), atol=1e-6)
    unknown = x.clone()
    unknown[:, -5] = 1e6  # a word that the vocabulary does not have
    assert bool(net(unknown).isfinite().all())


@pytest.mark.parametrize("shape", [(100,), (3, 8, 8), (3 * 7 * 7 + 5,)])
def test_inputs_that_are_no_image_and_question(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="the pixels of a square colour image"):
        models.build("vqa", SMALL, given=(shape, 4))
