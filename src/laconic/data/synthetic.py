"""A linear teacher with a deviation per client: data whose best model is known."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.core import DataError, Key
from laconic.data.assignment import Ragged
from laconic.data.federation import Federation


def synthetic(
    *,
    clients: int = 100,
    features: int = 20,
    train_examples: int = 2000,
    test_examples: int = 1000,
    rho: float = 0.1,
    noise: float = 1.5,
    seed: int = 0,
) -> Federation:
    r"""Regression on a linear teacher: $y = u_m^\top x + \varepsilon$ with $u_m = v + r_m$ (Liang et al., 2020).

    $x \sim U[-1, 1]^d$, $v \sim U[0, 1]^d$, $r_m \sim N(0, \rho^2 I)$ and $\varepsilon \sim N(0, \mathtt{noise}^2)$;
    every client `m` has its own teacher $u_m$ (`linear_teachers` gives them) and its own test set. `noise` is a
    standard deviation: 1.5 as the paper says, 2.25 for the curves that it shows.

    >>> synthetic(clients=5, train_examples=30, test_examples=10)
    Federation(synthetic: 5 clients, 150 training and 50 test examples, regression, shape (20,))
    """
    for setting, value in (("clients", clients), ("features", features), ("train_examples", train_examples)):
        if value < 1:
            raise DataError(f"synthetic: {setting} must be at least 1, got {value}.")
    if test_examples < 0 or not (rho >= 0 and noise >= 0):
        raise DataError(
            f"synthetic: test_examples, rho and noise can't be negative, got {test_examples}, {rho}, {noise}."
        )
    _, teachers = linear_teachers(clients=clients, features=features, rho=rho, seed=seed)
    rng = Key.from_seed(seed).fold_in("synthetic", "examples").numpy()

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(rng.uniform(-1, 1, size=(clients, count, features)))
        noisy = torch.from_numpy(noise * rng.standard_normal((clients, count, 1)))
        y = x @ teachers.unsqueeze(2) + noisy
        return x.reshape(-1, features).float(), y.reshape(-1, 1).float()

    x, y = draw(train_examples)
    test_x, test_y = draw(test_examples)
    return Federation(
        "synthetic",
        torch.cat([x, test_x]),
        torch.cat([y, test_y]),
        Ragged.from_sizes(np.full(clients, train_examples, dtype=np.int64)),
        Ragged.from_sizes(np.full(clients, test_examples, dtype=np.int64), start=len(x)),
        torch.arange(len(x), len(x) + len(test_x)),
        classes=0,
    )


def linear_teachers(
    *, clients: int = 100, features: int = 20, rho: float = 0.1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The truth behind `synthetic` with these settings: the mean teacher `v` and one teacher per client.

    >>> v, teachers = linear_teachers(clients=5)
    >>> v.shape, teachers.shape
    (torch.Size([20]), torch.Size([5, 20]))
    """
    rng = Key.from_seed(seed).fold_in("synthetic", "teachers").numpy()
    v = torch.from_numpy(rng.uniform(0, 1, size=features))
    return v, v + torch.from_numpy(rho * rng.standard_normal((clients, features)))
