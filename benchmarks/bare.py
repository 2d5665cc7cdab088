"""The yardstick: federated averaging as a bare PyTorch loop in two processes of one thread each.

No frames, no checks, no ledger: weights go to and fro in shared memory, each process adds up its own clients, and the
parent averages. It makes the same steps as laconic's FedAvg: same first weights, same clients, same batches, which
`benchmarks.rounds` checks by comparing the weights after a round. Its inner loop is the usual one, `torch.optim.SGD`;
with `quick` it computes in bfloat16, images and weights in channels-last order.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable

import torch
from torch import Tensor, nn

from laconic.core import ClientInfo, channels_last
from laconic.data import Federation
from laconic.engine import Agreement

_CONTEXT = multiprocessing.get_context("fork")


class BareLoop:
    """Two worker processes with the data and a model each."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        federation: Federation,
        agreement: Agreement,
        first: list[Tensor],
        *,
        lr: float,
        batch_size: int,
        processes: int = 2,
        quick: bool = False,
        epochs: int = 1,
    ) -> None:
        self.weights = self._weights = [weight.clone().share_memory_() for weight in first]
        self._sums = [[torch.zeros_like(w).share_memory_() for w in self._weights] for _ in range(processes)]
        self._pipes = []
        self._processes = []
        for sums in self._sums:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_work,
                args=(theirs, build, federation, agreement, self._weights, sums, lr, batch_size, quick, epochs),
                daemon=True,
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
    agreement: Agreement,
    weights: list[Tensor],
    sums: list[Tensor],
    lr: float,
    batch_size: int,
    quick: bool,
    epochs: int,
) -> None:
    torch.set_num_threads(1)
    module = build().train()
    examples = federation.x
    if quick:
        module, examples = module.to(memory_format=torch.channels_last), channels_last(examples)  # type: ignore[call-overload]
    loss_function = nn.CrossEntropyLoss()
    parameters = list(module.parameters())
    while True:
        number, clients = pipe.recv()
        for total in sums:
            total.zero_()
        for client in clients:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)
            optimizer = torch.optim.SGD(parameters, lr=lr)
            index = federation.client(client).train.index
            key = agreement.client_key(ClientInfo(client, number, 0)).fold_in("batches")
            orders = [torch.from_numpy(key.fold_in("epoch", e).numpy().permutation(len(index))) for e in range(epochs)]
            for rows in (rows for order in orders for rows in index[order].split(batch_size)):
                optimizer.zero_grad()
                batch = channels_last(examples[rows]) if quick else examples[rows]
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=quick):
                    output = module(batch)
                loss_function(output.float(), federation.y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for total, parameter in zip(sums, parameters, strict=True):
                    total += parameter
        pipe.send(None)
