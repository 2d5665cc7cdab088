"""What a representation gives away: an adversary fitted afresh on the frozen representations of one client.

An adversary that was trained against a representation says little about it, for the representation was trained to
fool this very adversary. So figures about fairness come from a new one, which nobody has tried to fool.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.core import ClientData, DataError, Key, Part, Predictor, Task, isolated
from laconic.methods.objectives import adversary_net, representation
from laconic.methods.solvers import Solver, solve
from laconic.models.initial import initialize

_SOLVER = Solver(optimizer="adam", lr=3e-3, local_epochs=30, batch_size=64)


def probe(predictor: Predictor, tap: str, data: ClientData, key: Key) -> dict[str, float]:
    """ROC-AUC of every protected attribute (`posthoc_auc_0` …) and of the label, where there are two classes (`auc`).

    Fitted on the client's training examples, evaluated on its test examples. An attribute that is the same for all test
    examples has no AUC and is left out.
    """
    if data.train.protected is None or data.test.protected is None:
        raise DataError("a probe needs protected attributes, which these data do not have; adult has them.")
    predictor.eval()
    seen, new = (representation_of(predictor, tap, part) for part in (data.train, data.test))
    mean, std = seen.mean(dim=0), seen.std(dim=0).clamp(min=1e-6)
    protected = data.train.protected[data.train.index]
    task = Task(
        lambda: adversary_net(seen.shape[1], protected.shape[1]),
        loss=F.binary_cross_entropy_with_logits,
        metrics={},
        initialize=initialize,
        outputs="values",
    )
    task.load(task.init(key))
    solve(task, Part.whole((seen - mean) / std, protected), _SOLVER, round=1, key=key)
    with torch.no_grad():
        guesses = task.module.eval()((new - mean) / std)
        outputs = predictor(data.test.tensors()[0])
    found = {
        f"posthoc_auc_{i}": roc_auc(guesses[:, i], data.test.protected[data.test.index, i] > 0.5)
        for i in range(protected.shape[1])
    }
    if outputs.dim() == 2 and outputs.shape[1] == 2:
        found["auc"] = roc_auc(outputs[:, 1] - outputs[:, 0], data.test.tensors()[1] == 1)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def finetune(predictor: Predictor, task: Task, data: ClientData, solver: Solver, key: Key) -> Predictor:
    """A copy of a predictor, trained on a client's own examples."""
    own = copy.deepcopy(predictor)
    tuned = Task(lambda: own, loss=task.loss, device=task.device, precision=task.precision)
    with isolated(key):  # dropout and the like
        solve(tuned, data.train, solver, round=1, key=key)
    return own.eval()


def representation_of(predictor: Predictor, tap: str, part: Part) -> Tensor:
    """The frozen representations of some examples, one row each."""
    with torch.no_grad():
        return representation(predictor, tap, part.tensors()[0]).flatten(1)


def roc_auc(scores: Tensor, positive: Tensor) -> float:
    """The probability that a positive example scores above a negative one; ties count half. NaN without both kinds.

    >>> roc_auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([False, False, True, True]))
    0.875
    """
    count = int(positive.sum())
    other = len(positive) - count
    if not count or not other:
        return math.nan
    _, place, sizes = np.unique(scores.double().numpy(), return_inverse=True, return_counts=True)
    ranks = sizes.cumsum() - (sizes - 1) / 2  # the mean rank of those that tie
    total = float(ranks[place[positive.numpy()]].sum())
    return (total - count * (count + 1) / 2) / (count * other)
