"""What is missing on this machine, in plain words."""

from __future__ import annotations

import datetime
import importlib.util
import os
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from laconic.engine import versions
from laconic.experiment import bfloat16_arithmetic

EXTRAS = {
    "data": ("datasets", "PIL", "pyarrow"),
    "report": ("matplotlib", "pandas"),
    "tensorboard": ("tensorboard",),
    "flower": ("flwr", "ray"),
    "ray": ("ray",),
    "onnx": ("onnx", "onnxscript"),
    "vqa": ("easy_vqa", "PIL"),
    "privacy": ("dp_accounting",),
}
"""What each extra brings, by the name that is imported."""
_FLOWER = ((1, 41), (1, 43))  # the first version that will do, and the first that was not tried
_COMMANDS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr", "flwr-clientapp", "flwr-serverapp")


class Finding(NamedTuple):
    """Something that was looked at: `good` True, or False with what to do; None for what is merely absent."""

    what: str
    good: bool | None
    detail: str


def examine(folder: Path | None = None, *, ports: tuple[int, ...] = (8000, 9094)) -> Iterator[Finding]:
    """Look at this machine, and at the folder of an app where one is given."""
    yield from _python()
    yield from _processor()
    yield from _extras()
    yield from _flower()
    yield from (_port(port) for port in ports)
    if folder is not None:
        yield from _folder(folder)


def _python() -> Iterator[Finding]:
    here = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", good, here if good else f"{here}; laconic needs 3.11 or later")
    for name, number in versions().items():
        if name in ("laconic", "torch", "numpy", "constriction"):
            yield Finding(name, True, number)


def _processor() -> Iterator[Finding]:
    quick = bfloat16_arithmetic()
    yield Finding("bfloat16", True if quick else None, "quicker than float32" if quick else "slower than float32 here")


def _extras() -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        detail = (
            "installed" if not missing else f"no {', '.join(missing)}; pip install 'laconic[{extra}]' if you need it"
        )
        yield Finding(f"extra {extra}", None if missing else True, detail)


def _flower() -> Iterator[Finding]:
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        return
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    low, high = _FLOWER
    good = low <= numbers < high
    wanted = f"laconic was tried with {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}; pip install 'laconic[flower]'"
    yield Finding("flower", good, installed if good else f"{installed}; {wanted}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = [command for command in _COMMANDS if shutil.which(command, path=path) is None]
    yield Finding(
        "flower's commands", not missing, "found" if not missing else f"no {', '.join(missing)}; reinstall flwr"
    )
    away = [command for command in _COMMANDS if shutil.which(command) is None]
    if not missing and away:
        # A SuperNode starts the others by name.
        folder = Path(sys.executable).parent
        yield Finding(
            "PATH", False, f'{away[0]} is not on it; activate the environment, or: export PATH="{folder}:$PATH"'
        )


def _port(port: int) -> Finding:
    who = {8000: "SuperLink", 9094: "a node's own processes"}.get(port, "asked for")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                f"port {port}", False, f"cannot be had ({error.strerror}); {who}: use another, or end its owner"
            )
    return Finding(f"port {port}", True, f"free ({who})")


def _folder(folder: Path) -> Iterator[Finding]:
    from laconic.config import experiment_from, read_table
    from laconic.core import LaconicError

    config = folder / "run.toml"
    try:
        experiment = experiment_from(read_table(config))
        clients = experiment.simulation.clients.num_clients
        fingerprint = experiment.simulation.agreement.fingerprint.hex()
        yield Finding(
            "run.toml", True, f"{experiment.name}: {clients} clients, run {fingerprint} (the same on every node)"
        )
    except LaconicError as error:
        yield Finding("run.toml", False, str(error))
    certs = folder / "certs"
    if not certs.is_dir():
        detail = f"none; laconic deploy certs {folder}, or your own authority's (or it is an --insecure trial)"
        yield Finding("certificates", None, detail)
        return
    yield from _certificates(certs)


def _certificates(certs: Path) -> Iterator[Finding]:
    try:
        from cryptography import x509
    except ImportError:
        yield Finding("certificates", False, "cannot be read without the extra flower")
        return
    now = datetime.datetime.now(datetime.UTC)
    read: dict[str, Any] = {}
    for name in ("ca.crt", "server.pem"):
        path = certs / name
        if not path.exists():
            yield Finding(name, None, "not here (only the SuperLink's machine needs server.pem)")
            continue
        try:
            read[name] = certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            yield Finding(name, False, f"cannot be read ({error})")
            continue
        days = (certificate.not_valid_after_utc - now).days
        if certificate.not_valid_before_utc > now:
            yield Finding(
                name, False, f"valid only from {certificate.not_valid_before_utc:%Y-%m-%d}; is the clock right?"
            )
        elif days < 0:
            yield Finding(name, False, f"expired {-days} days ago; make it anew")
        else:
            yield Finding(name, True, f"valid for {days} more days{_names(certificate)}")
    if len(read) == 2:
        try:
            read["server.pem"].verify_directly_issued_by(read["ca.crt"])
            yield Finding("trust", True, "server.pem is signed by ca.crt")
        except Exception:  # whatever it is, the chain does not hold
            yield Finding("trust", False, "server.pem is not signed by ca.crt; nodes would refuse the SuperLink")
    for key in sorted(certs.glob("*.key")):
        if stat.S_IMODE(key.stat().st_mode) & 0o077:
            yield Finding(key.name, False, f"others can read it; chmod 600 {key}")


def _names(certificate: Any) -> str:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    names = [str(name.value) for name in found]
    return f", for {', '.join(names)}: nodes must call it by one of these"
