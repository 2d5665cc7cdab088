"""The server's half of the run that run.toml describes. Modules of your own may lie beside this file."""

from pathlib import Path

from laconic.flower import server_app

app = server_app(Path(__file__).with_name("run.toml"))
