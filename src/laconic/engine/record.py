"""What a run says of one round: a typed record, and the line of `metrics.jsonl` that it becomes (docs/runs.md).

What clients said of themselves stands in a part of its own, so that no client can name an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

SCHEMA = 2
"""The version of a record's form."""
_TRAFFIC = ("cohort", "replies", "rejected", "bytes_up", "bytes_down")
_CARRIER = ("transport_bytes_up", "transport_bytes_down", "evaluation_bytes_down", "late")
_REST = ("round", "rejections", "abandoned", "seconds")
# What clients of 0.1.0 said: in its records nothing told it from evaluations.
_SAID: tuple[str, ...] = ("train_loss", "ones", "mask_entropy", "mask_cross_entropy", "mean_pi", "open_gates")
_SAID = (*_SAID, "gradients_sent", "adversary_loss")


class Rejection(NamedTuple):
    """A reply that was not counted, and why."""

    client: int
    round: int
    reason: str
    detail: str


@dataclass(frozen=True)
class Record(Mapping[str, Any]):
    """One round. As a mapping it is flat: `record["global_accuracy"]`, `record["clients/train_loss"]`.

    >>> record = Record(1, {"bytes_up": 5}, clients={"train_loss": 0.5}, evaluation={"global_accuracy": 0.9})
    >>> record["bytes_up"], record["clients/train_loss"], record.evaluation["global_accuracy"]
    (5, 0.5, 0.9)
    """

    round: int
    traffic: Mapping[str, float]
    """Who took part (`cohort`, `replies`, `rejected`), bytes of frames, and what only a carrier counts."""
    clients: Mapping[str, float] = field(default_factory=dict)
    """What the accepted clients said of their training, averaged."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """What evaluations found; empty in rounds without one."""
    rejections: tuple[Rejection, ...] = ()
    abandoned: str = ""
    """Why the round does not count, where it does not."""
    seconds: float = 0.0

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Record:
        """A record from a line of `metrics.jsonl`, of this version or of the first, which was flat.

        >>> Record.read({"round": 1, "bytes_up": 5, "train_loss": 0.5, "global_loss": 2.0, "seconds": 0.1}).clients
        {'train_loss': 0.5}
        """
        if line.get("schema") not in (None, SCHEMA):
            raise ValueError(f"a record of version {line['schema']}, but this laconic knows 1 and {SCHEMA}")
        refused = tuple(Rejection(**rejection) for rejection in line.get("rejections", ()))
        rest = {"rejections": refused, "abandoned": line.get("abandoned", ""), "seconds": line.get("seconds", 0.0)}
        if "schema" in line:
            return cls(line["round"], line["traffic"], line.get("clients", {}), line.get("evaluation", {}), **rest)
        known = {*_TRAFFIC, *_CARRIER, *_SAID, *_REST}
        return cls(
            line["round"],
            {name: line[name] for name in (*_TRAFFIC, *_CARRIER) if name in line},
            {name: line[name] for name in _SAID if name in line},
            {name: value for name, value in line.items() if name not in known},
            **rest,
        )

    def line(self) -> dict[str, Any]:
        """The record as a line of `metrics.jsonl`; a value that is not finite becomes null, for NaN is not JSON."""
        rest = {"rejections": [r._asdict() for r in self.rejections], "abandoned": self.abandoned}
        parts = {"traffic": self.traffic, "clients": _finite(self.clients), "evaluation": _finite(self.evaluation)}
        said = {name: value for name, value in {**parts, **rest}.items() if value}
        return {"schema": SCHEMA, "round": self.round, **said, "seconds": self.seconds}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """Everything under one name each; what clients said has `clients/` before it."""
        flat: dict[str, Any] = {"round": self.round, **self.traffic}
        flat |= {f"clients/{name}": value for name, value in _finite(self.clients).items()}
        flat |= _finite(self.evaluation)
        if self.rejections:
            flat["rejections"] = [rejection._asdict() for rejection in self.rejections]
        return {**flat, **({"abandoned": self.abandoned} if self.abandoned else {}), "seconds": self.seconds}

    def __getitem__(self, name: str) -> Any:
        return self.flat[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.flat)

    def __len__(self) -> int:
        return len(self.flat)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
