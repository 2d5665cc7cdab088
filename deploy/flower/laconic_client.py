"""The clients' half. `laconic_relay` keeps a process per node, so that torch is not imported for every message."""

from pathlib import Path

from laconic_relay import client_app

app = client_app(Path(__file__).with_name("run.toml"))
