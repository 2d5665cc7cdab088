"""The yardstick: federated averaging as a bare PyTorch loop in two processes of one thread each.

No frames, no checks, no ledger: weights go to and fro in shared memory, each process adds up its own clients, and the
parent averages. It makes the same steps as laconic's FedAvg (same clients, same batches, same learning rate).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable

import torch
from torch import Tensor, nn

from laconic.core import Key
from laconic.data import Federation

_CONTEXT = multiprocessing.get_context("fork")


class BareLoop:
    """Two worker processes with the data and a model each."""

    def __init__(
        self, build: Callable[[], nn.Module], federation: Federation, *, lr: float, batch_size: int, processes: int = 2
    ) -> None:
        self._federation = federation
        self._weights = [p.detach().clone().share_memory_() for p in build().parameters()]
        self._sums = [[torch.zeros_like(w).share_memory_() for w in self._weights] for _ in range(processes)]
        self._pipes = []
        self._processes = []
        for sums in self._sums:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_work, args=(theirs, build, federation, self._weights, sums, lr, batch_size), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def round(self, number: int, cohort: list[int]) -> None:
        for place, pipe in enumerate(self._pipes):
            pipe.send((number, cohort[place :: len(self._pipes)]))
        for pipe in self._pipes:
            pipe.recv()
        with torch.no_grad():
            for i, weight in enumerate(self._weights):
                weight.copy_(sum(sums[i] for sums in self._sums)).div_(len(cohort))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _work(
    pipe: multiprocessing.connection.Connection,
    build: Callable[[], nn.Module],
    federation: Federation,
    weights: list[Tensor],
    sums: list[Tensor],
    lr: float,
    batch_size: int,
) -> None:
    torch.set_num_threads(1)
    module = build().train()
    loss_function = nn.CrossEntropyLoss()
    parameters = list(module.parameters())
    key = Key.from_seed(0)
    while True:
        number, clients = pipe.recv()
        for total in sums:
            total.zero_()
        for client in clients:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)
            optimizer = torch.optim.SGD(parameters, lr=lr)
            x, y = federation.client(client).train.tensors()
            order = torch.from_numpy(key.fold_in(number, client).numpy().permutation(len(y)))
            for rows in order.split(batch_size):
                optimizer.zero_grad()
                loss_function(module(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for total, parameter in zip(sums, parameters, strict=True):
                    total += parameter
        pipe.send(None)
