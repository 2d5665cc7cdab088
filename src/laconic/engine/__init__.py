"""The engine: carries the bytes and counts them. The only part of laconic that sees both methods and codecs."""

from laconic.engine.bounds import Bounds, Limit
from laconic.engine.checkpoint import Checkpoints
from laconic.engine.history import Point, bytes_to_reach, curve, frame, needed, plot
from laconic.engine.ledger import Ledger
from laconic.engine.record import SCHEMA, Record, Rejection
from laconic.engine.round import (
    Agreement,
    DownMemory,
    Held,
    Link,
    LocalUpdate,
    Score,
    client_round,
    evaluate,
    open_reply,
    receive,
    receive_snapshot,
    send,
    send_snapshot,
    server_round,
    to_everyone,
)
from laconic.engine.run import Each, Observer, Run, RunDirectory, Silent, changes, execute, in_use, versions
from laconic.engine.simulate import Evaluation, Metrics, Schedule, Simulation, State, Stop
from laconic.engine.store import ClientStore, DiskStore, Store, pack, unpack
from laconic.engine.workers import Clients

__all__ = [
    "Agreement",
    "Bounds",
    "Checkpoints",
    "Clients",
    "ClientStore",
    "DiskStore",
    "DownMemory",
    "Each",
    "Evaluation",
    "Held",
    "Ledger",
    "Limit",
    "Link",
    "Metrics",
    "LocalUpdate",
    "Observer",
    "Point",
    "Record",
    "Rejection",
    "Run",
    "RunDirectory",
    "SCHEMA",
    "Schedule",
    "Score",
    "Silent",
    "Simulation",
    "State",
    "Stop",
    "Store",
    "bytes_to_reach",
    "changes",
    "client_round",
    "curve",
    "evaluate",
    "execute",
    "frame",
    "in_use",
    "needed",
    "open_reply",
    "pack",
    "plot",
    "receive",
    "receive_snapshot",
    "send",
    "send_snapshot",
    "server_round",
    "to_everyone",
    "unpack",
    "versions",
]
