"""The folder of a Flower app: everything that a deployment of one TOML file needs, in plain files."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import tomli_w

from laconic.config import experiment_from, read_table
from laconic.core import ConfigError, RunError
from laconic.engine.files import cannot_write, write_atomically

_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")

_PYPROJECT = Template("""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "laconic-$slug"
version = "1.0.0"
description = "A laconic run on Flower."
license = "Apache-2.0"
dependencies = ["flwr>=1.41,<1.43", "laconic"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "laconic"

[tool.flwr.app.components]
serverapp = "laconic_server:app"
clientapp = "laconic_client:app"

# What `flwr run --run-config` may change: where the run's folder is made (relative to where the SuperLink was
# started), whether it goes on from its newest checkpoint, and whether it starts over.
[tool.flwr.app.config]
out = "runs"
resume = true
overwrite = false
""")

_SERVER = '''\
"""The server's half of the run that run.toml describes. Modules of your own may lie beside this file."""

from pathlib import Path

from laconic.flower import server_app

app = server_app(Path(__file__).with_name("run.toml"))
'''

_CLIENT = '''\
"""The clients' half. `laconic_relay` keeps a process per node, so that torch is not imported for every message."""

from pathlib import Path

from laconic_relay import client_app

app = client_app(Path(__file__).with_name("run.toml"))
'''

_ENV = Template("""\
# Read by the other scripts. Nothing is reported, fetched or installed unasked, and Flower's own files lie here.
HERE=$$(cd "$$(dirname "$$0")" && pwd)
ADDRESS=$${LACONIC_SUPERLINK:-$address}
export FLWR_HOME=$${FLWR_HOME:-$$HERE/home}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 RAY_USAGE_STATS_ENABLED=0
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=$${FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.1}
export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
mkdir -p "$$FLWR_HOME"
cat > "$$FLWR_HOME/config.toml" <<END
[superlink]
default = "laconic"

[superlink.laconic]
address = "$$ADDRESS"
$trust
END
""")

_SUPERLINK = Template("""\
#!/bin/sh
# Start the server's end. Extra arguments go to flower-superlink.
set -eu
. "$$(dirname "$$0")/env.sh"
${warning}exec flower-superlink --host "$${LACONIC_BIND:-$bind}" --port "$${ADDRESS##*:}" $options "$$@"
""")

_SUPERNODE = Template("""\
#!/bin/sh
# Start a node: supernode.sh CLIENT [arguments of flower-supernode]. CLIENT is a number from 0 to $last.
# LACONIC_DATA_SOURCE="module:function" gives the client's data; without it they are those of [data] in run.toml.
set -eu
. "$$(dirname "$$0")/env.sh"
CLIENT=$$1; shift
CONFIG="partition-id=$$CLIENT num-partitions=$clients state=\\"$${LACONIC_STATE:-$$HERE/states}\\""
CONFIG="$$CONFIG resident=$${LACONIC_RESIDENT:-true}"
[ -z "$${LACONIC_DATA_SOURCE:-}" ] || CONFIG="$$CONFIG data=\\"$$LACONIC_DATA_SOURCE\\""
PORT=$${LACONIC_NODE_PORT:-$$((9094 + CLIENT))}
${warning}exec flower-supernode --superlink "$$ADDRESS" --port "$$PORT" --node-config "$$CONFIG" $options "$$@"
""")

_REGISTER = """\
#!/bin/sh
# Tell the SuperLink which nodes may take part, and write down whose they are (nodes.toml): the public keys in certs/.
# A client moves to another key by: register.sh --client N --key FILE.pub
set -eu
. "$(dirname "$0")/env.sh"
exec laconic deploy register "$HERE" "$@"
"""

_SUBMIT = """\
#!/bin/sh
# Start the run, or go on with it where it was left. Extra arguments go to `flwr run`.
set -eu
. "$(dirname "$0")/env.sh"
exec flwr run "$HERE" laconic --stream "$@"
"""

_WARNING = 'echo "WARNING: --insecure: no encryption, and any node is admitted. Not for data that matters." >&2\n'


def make_folder(folder: Path, config: Path, *, address: str = "127.0.0.1:8000", insecure: bool = False) -> list[Path]:
    """Write the app of a TOML file into a folder; gives the files. What is wrong with the file is said before."""
    if not (match := _ADDRESS.fullmatch(address)) or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"--address must be HOST:PORT, got {address!r}.")
    table = read_table(config)
    experiment = experiment_from(table)
    if (folder / "pyproject.toml").exists():
        raise RunError(f"{folder} already holds an app; choose another folder, or remove it first.")
    clients = experiment.simulation.clients.num_clients
    warning = _WARNING if insecure else ""
    files = {
        "pyproject.toml": _PYPROJECT.substitute(slug=re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")),
        ".gitignore": "# Not part of the app that goes to the nodes.\ncerts/\nhome/\nruns/\nstates/\n",
        "laconic_server.py": _SERVER,
        "laconic_client.py": _CLIENT,
        "run.toml": tomli_w.dumps({section: settings for section, settings in table.items() if settings}),
        "env.sh": _ENV.substitute(
            address=address, trust="insecure = true" if insecure else 'root-certificates = "$HERE/certs/ca.crt"'
        ),
        "superlink.sh": _SUPERLINK.substitute(
            warning=warning,
            bind="127.0.0.1" if match[1] in ("127.0.0.1", "localhost") else "0.0.0.0",  # noqa: S104 - what it is for
            options="--insecure"
            if insecure
            else '--ssl-ca-certfile "$HERE/certs/ca.crt" --ssl-certfile "$HERE/certs/server.pem" '
            '--ssl-keyfile "$HERE/certs/server.key" --enable-supernode-auth',
        ),
        "supernode.sh": _SUPERNODE.substitute(
            warning=warning,
            clients=clients,
            last=clients - 1,
            options="--insecure"
            if insecure
            else '--root-certificates "$HERE/certs/ca.crt" --auth-supernode-private-key "$HERE/certs/node-$CLIENT.key"',
        ),
        **({} if insecure else {"register.sh": _REGISTER}),
        "submit.sh": _SUBMIT,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    written = []
    for name, text in files.items():
        path = folder / name
        write_atomically(path, text.encode())
        if text.startswith("#!"):
            path.chmod(0o755)
        written.append(path)
    return written
