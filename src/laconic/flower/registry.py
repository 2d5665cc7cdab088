"""Which node is which client's: a table that registration writes, and nothing that a node says changes.

A SuperLink gives a node its number when its public key is registered, and lets nobody else use that number. So a table
of clients and numbers binds a client to a key. It lies in the app's folder, as `nodes.toml`, and travels with the app::

    [clients.0]
    node = "12041573028571953120"
    key = "sha256 of the public key"
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w

from laconic.core import ConfigError, RunError, printable
from laconic.engine.files import write_atomically

FILE = "nodes.toml"
"""The table's name, beside the run's configuration."""
_KEY = re.compile(r"node-([0-9]+)\.pub")
Register = Callable[[Path], int]
"""(public key): registers it, and gives the node's number."""


def registered(folder: Path) -> dict[int, int] | None:
    """The node of each client, where a folder has a table; a table that cannot be one is refused."""
    path = folder / FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["clients"]
        nodes = {int(client): int(entry["node"]) for client, entry in table.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no table of nodes ({error}); write it with laconic deploy register.") from None
    if len(set(nodes.values())) < len(nodes):
        raise ConfigError(f"{path}: two clients have the same node, but a node has one vote; register a key for each.")
    return nodes


def register(folder: Path, keys: Mapping[int, Path] | None = None, *, using: Register | None = None) -> dict[int, int]:
    """Register the public keys of some clients (all in `certs/`), and write the table; gives the node of each.

    A client that is there already is moved to its new key. One whose key has not changed keeps its node where the
    SuperLink still knows it.
    """
    keys = keys or {
        int(match[1]): path for path in (folder / "certs").glob("*.pub") if (match := _KEY.fullmatch(path.name))
    }
    if not keys:
        raise ConfigError(
            f"{folder / 'certs'} holds no node-N.pub; laconic deploy certs {folder} makes some for trials."
        )
    path = folder / FILE
    known = registered(folder) or {}
    table = tomllib.loads(path.read_text(encoding="utf-8"))["clients"] if known else {}
    for client, key in sorted(keys.items()):
        try:
            digest = hashlib.sha256(key.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"cannot read {key}: {(error.strerror or str(error)).lower()}.") from None
        try:
            node = (using or _with_flower)(key)
        except RunError:
            if table.get(str(client), {}).get("key") != digest:
                raise
            continue
        table[str(client)] = {"node": str(node), "key": digest}
        write_atomically(path, tomli_w.dumps({"clients": table}).encode())  # what is registered is in the table
    return registered(folder) or {}


def _with_flower(key: Path) -> int:
    """By Flower's own command, at the SuperLink that the folder's env.sh names."""
    command = ["flwr", "supernode", "register", str(key), "laconic", "--format", "json"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - Flower's own
    except FileNotFoundError:
        raise ConfigError("there is no command flwr; pip install 'laconic[flower]'.") from None
    found = re.search(r"\{.*\}", ended.stdout, re.DOTALL)
    try:
        return int(json.loads(found[0] if found else "")["node-id"])
    except (ValueError, KeyError, TypeError):
        said = printable(" ".join((ended.stderr or ended.stdout).split()))[:300]
        raise RunError(f"{key.name} was not registered: Flower says {said or ended.returncode}.") from None
