"""Two attackers of ten against every kind of method, with and without the bounds that runs have by default.

`python results/trust/measure.py` makes table.md beside this file: digits, dealt by Dirichlet(1) to ten clients, all in
every round, seed 1. A cell is the accuracy without → with the bounds; `fedmedian` and `fedrobust` have them on.
Attackers are clients 3 and 7. What an attack is:

* scale: 1e9 times the difference, cut to what a receiver takes at all
* flip: −100 times the difference; turn: −2.5 times, which no bound on norms sees
* same: the same large value everywhere
* little: the mean of the honest minus one standard deviation, by attackers who know both
* claim: ten million examples, and the difference turned round (weighting = "examples")
* bomb: scale, in round 3 alone
* gates: all gates closed (fedsparse); votes: every bit of the mask against the client's own (fedpm)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import laconic as lc
from laconic.core import ClientInfo, Key, Reply, Tree, on_messages
from laconic.engine import open_reply
from laconic.methods import methods

HERE = Path(__file__).parent
ATTACKERS, SEED, LARGEST = (3, 7), 1, 9.9e8
SHORT: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "batch_size": 20}
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fedavg": ("fedavg", {}, 30),
    "fedopt": ("fedopt", {}, 30),
    "scaffold": ("scaffold", {}, 30),
    "fedsparse": ("fedsparse", {}, 30),
    "lg_fedavg": ("lg_fedavg", {}, 30),
    "fedpm": ("fedpm", {"lr": 0.1, "local_epochs": 3}, 30),
    "fedmedian": ("fedmedian", {}, 30),
    "fedrobust, trimmed mean": ("fedrobust", {"rule": "trimmed_mean", "attackers": 2}, 30),
    "fedrobust, Multi-Krum": ("fedrobust", {"rule": "krum", "attackers": 2, "best": 6}, 30),
    "fedrobust, centred clipping": ("fedrobust", {"rule": "centred_clipping", "attackers": 2}, 30),
    "vardrop": ("vardrop", {"lr": 0.01, "sigma_lr": 1.0, "local_steps": 1, "batch_size": 64}, 60),
}
ROBUST = ("fedmedian", "fedrobust")
ATTACKS = ("none", "scale", "flip", "turn", "same", "little", "claim", "bomb", "gates", "votes")
Change = Callable[[Tree], Tree]


def floats(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of whatever is a floating-point number."""
    return lambda message: {n: change(leaf) if leaf.is_floating_point() else leaf for n, leaf in message.items()}


def bits(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of whatever is a bit."""
    return lambda message: {n: change(leaf) if leaf.dtype == torch.bool else leaf for n, leaf in message.items()}


def closed(message: Tree) -> Tree:
    """No gate is open, so that no values are sent."""
    return {n: leaf if n == "gates" else leaf[:0] for n, leaf in bits(torch.zeros_like)(message).items()}


CHANGES: dict[str, Change] = {
    "scale": floats(lambda leaf: (leaf * 1e9).clamp(-LARGEST, LARGEST)),
    "flip": floats(lambda leaf: leaf * -100),
    "turn": floats(lambda leaf: leaf * -2.5),
    "same": floats(lambda leaf: torch.full_like(leaf, 100.0)),
    "votes": bits(torch.logical_not),
    "gates": closed,
}
CHANGES["bomb"] = CHANGES["scale"]


def attacked(method: lc.Method, attack: str) -> lc.Method:
    """The method with the attack in it."""
    if attack in CHANGES:

        def lie(message: Tree, client: ClientInfo, key: Key) -> Tree:
            late = attack == "bomb" and client.round != 3
            return message if client.id not in ATTACKERS or late else CHANGES[attack](message)

        return on_messages(method, client=lie)
    if attack == "little":  # it has the size of honest replies, so that it matters little that bounds came before
        return on_messages(method, server=little)
    return method


def little(replies: Iterable[Reply], key: Key) -> Iterator[Reply]:
    """What the two send instead, once the others' replies are known."""
    came = list(replies)
    honest = [reply.message for reply in came if reply.client.id not in ATTACKERS]
    made = dict(honest[0])
    for name, leaf in made.items():
        if leaf.is_floating_point():
            values = torch.stack([message[name] for message in honest])
            made[name] = values.mean(dim=0) - values.std(dim=0)
    return (replace(reply, message=made) if reply.client.id in ATTACKERS else reply for reply in came)


def claimed(agreement: Any, frame: bytes, received: Tree, client: ClientInfo) -> Reply:
    """A reply as its frame would have said it."""
    reply = open_reply(agreement, frame, received, client)
    if client.id not in ATTACKERS:
        return reply
    turned = floats(torch.neg)(reply.message)
    return replace(reply, client=replace(reply.client, examples=10_000_000), message=turned)


def applies(name: str, attack: str) -> bool:
    """Whether there is such an attack on this method."""
    if attack in ("gates", "votes"):
        return name == {"gates": "fedsparse", "votes": "fedpm"}[attack]
    if name == "fedpm":
        return attack == "none"
    if name == "vardrop":
        return attack in ("none", "scale", "bomb")
    if attack == "little":  # what it needs is replies of one shape
        return name != "fedsparse"
    return attack != "claim" or name in ("fedavg", "lg_fedavg")


def accuracy(name: str, attack: str, *, bounded: bool) -> float:
    """In the end; of clients' own models the median client's, for attackers may spoil their own."""
    called, settings, rounds = METHODS[name]
    weighting = {"weighting": "examples"} if attack == "claim" else {}
    method = attacked(methods.build(called, {**SHORT, **settings, **weighting}), attack)
    data = lc.data.digits(clients=10, partition={"kind": "dirichlet", "alpha": 1.0})
    limits = {} if bounded else {"max_norm": "off", "max_weight": "off"}
    how: dict[str, Any] = {"rounds": rounds, "cohort": 10, "eval_every": rounds, "seed": SEED, "workers": 0, **limits}
    opened = patch("laconic.engine.simulate.open_reply", claimed if attack == "claim" else open_reply)
    try:
        with opened:
            summary = lc.fit(data=data, method=method, **how).summary
    except lc.RunError:  # every round was abandoned: the state was not finite
        return 0.1
    return float(summary["local_accuracy_p50" if called == "lg_fedavg" else "global_accuracy"])


def row(name: str) -> str:
    """A method's row of the table."""
    cells = []
    for attack in ATTACKS:
        kinds = () if not applies(name, attack) else (True,) if name.startswith(ROBUST) else (False, True)
        found = [accuracy(name, attack, bounded=bounded) for bounded in kinds]
        cells.append(" → ".join(f"{100 * value:.1f}" for value in found) or "–")
        print(name, attack, cells[-1], file=sys.stderr, flush=True)
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """All of them, or those that are named; the rows of others stay."""
    torch.set_num_threads(1)
    began, path = time.process_time(), HERE / "table.md"
    for name in sys.argv[1:] or METHODS:
        made = row(name)
        old = path.read_text().splitlines()[2:] if path.exists() else []
        rows = {**{line.split(" | ")[0].removeprefix("| "): line for line in old}, name: made}
        lines = ["| method | " + " | ".join(ATTACKS) + " |", "|---|" + "---:|" * len(ATTACKS)]
        path.write_text("\n".join([*lines, *(rows[known] for known in METHODS if known in rows)]) + "\n")
    print(f"{time.process_time() - began:.0f} CPU seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
