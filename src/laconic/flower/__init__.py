"""Runs on Flower: the same round on real machines, or on Ray.

`server_app` and `client_app` are the two halves of a Flower app for a run that a TOML file describes. Both drive
`engine/round.py`: the server with a `Nodes` pool where the embedded engine has worker processes, a node with the very
`Train` job that a worker runs. Flower itself (the extra `flower`) is imported when an app is made.
"""

from laconic.flower.apps import client_app, on_ray, serve, server_app
from laconic.flower.messages import Answer, Call, Envelope
from laconic.flower.node import Endpoint
from laconic.flower.nodes import Nodes
from laconic.flower.states import FolderEntries, States

__all__ = [
    "Answer",
    "Call",
    "Endpoint",
    "Envelope",
    "FolderEntries",
    "Nodes",
    "States",
    "client_app",
    "on_ray",
    "serve",
    "server_app",
]
