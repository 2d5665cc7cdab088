"""The engine: carries the bytes and counts them. The only part of laconic that sees both methods and codecs."""

from laconic.engine.checkpoint import Checkpoints
from laconic.engine.cohort import Newcomer, sample_cohort
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
from laconic.engine.run import Observer, Run, RunDirectory, Silent, execute, versions
from laconic.engine.simulate import Record, Rejection, Schedule, Simulation, State, settings_text, simulate
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
    "Ledger",
    "ModelFile",
    "Link",
    "Newcomer",
    "Observer",
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
    "client_round",
    "evaluate",
    "execute",
    "open_reply",
    "pack",
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
