"""The engine: carries the bytes and counts them. The only part of laconic that sees both methods and codecs."""

from laconic.engine.checkpoint import Checkpoints
from laconic.engine.cohort import Newcomer, sample_cohort
from laconic.engine.history import Point, Record, bytes_to_reach, curve, frame, needed, plot
from laconic.engine.ledger import Ledger
from laconic.engine.model_file import ModelFile, load, open_model, read_model, write_model
from laconic.engine.probe import probe, roc_auc
from laconic.engine.round import (
    Agreement,
    Link,
    Score,
    Turn,
    client_round,
    evaluate,
    open_reply,
    receive,
    receive_whole,
    send,
    send_whole,
    server_round,
    to_everyone,
)
from laconic.engine.run import Each, Observer, Run, RunDirectory, Silent, changes, execute, in_use, versions
from laconic.engine.simulate import Rejection, Schedule, Simulation, State, settings_text, simulate
from laconic.engine.store import ClientStore, DiskStore, Store, pack, unpack

__all__ = [
    "load",
    "open_model",
    "read_model",
    "write_model",
    "Agreement",
    "Checkpoints",
    "ClientStore",
    "DiskStore",
    "Each",
    "Ledger",
    "ModelFile",
    "Link",
    "Newcomer",
    "Observer",
    "Point",
    "Record",
    "Rejection",
    "Run",
    "RunDirectory",
    "Schedule",
    "Score",
    "Silent",
    "Simulation",
    "State",
    "Store",
    "Turn",
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
    "probe",
    "receive",
    "receive_whole",
    "roc_auc",
    "sample_cohort",
    "send",
    "send_whole",
    "server_round",
    "settings_text",
    "simulate",
    "to_everyone",
    "unpack",
    "versions",
]
