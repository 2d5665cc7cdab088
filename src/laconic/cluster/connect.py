"""The way into a cluster: a Ray that is running already, or one of our own on this machine."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Any, NamedTuple

from laconic.core import ConfigError, RunError
from laconic.engine.workers import cores

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray lets its workers give way to everything else; here they are the work itself
}
"""The environment of a Ray of our own."""
_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's word, on any system, for: on 127.0.0.1 alone
_ANSWER = 5.0  # seconds that an address has to answer
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # HTTP/2, and an empty SETTINGS frame
_SETTINGS = b"\x04"  # the type of the frame that an HTTP/2 server begins with
_ROOM = 10.0  # seconds that a cluster has to have room


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a run's clients are computed, and what each of them takes.

    `address` is `HOST:PORT` of a running Ray, or `"auto"` for the one that this machine belongs to; without it a Ray
    of our own is started on this machine, with as many CPUs as there are cores, and ended with the run.
    """

    address: str | None = None
    cpus_per_client: float = 1.0
    gpus_per_client: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cpus_per_client) and self.cpus_per_client > 0):
            raise ConfigError(f"--cpus-per-client must be more than 0, got {self.cpus_per_client:g}.")
        if not (math.isfinite(self.gpus_per_client) and self.gpus_per_client >= 0):
            raise ConfigError(f"--gpus-per-client must not be negative, got {self.gpus_per_client:g}.")
        if self.address is not None and self.address != "auto":
            host, colon, port = self.address.rpartition(":")
            if not (host and colon and port.isdigit() and "/" not in host):
                raise ConfigError(f"--address must be auto or HOST:PORT of a Ray, got {self.address!r}.")

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Be connected; a Ray that this process has joined by itself is used as it is, and left alone."""
        if self.address is None and "ray" not in sys.modules:
            os.environ.setdefault(*_LOOPBACK)
        ray = find_ray()
        if ray.is_initialized():
            yield
            return
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        try:
            with _own_signals():
                self._connect(ray)
            yield
        finally:
            ray.shutdown()

    def _connect(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        if self.address is None:
            try:
                ray.init(address="local", num_cpus=cores(), include_dashboard=False, **quiet)
            except Exception as error:  # whatever Ray raises: nothing of ours has begun
                raise RunError(f"Ray cannot be started on this machine: {_said(error)}.") from None
            return
        if self.address != "auto":
            _knock(self.address, ray._private.services.canonicalize_bootstrap_address(self.address))
        try:
            ray.init(address=self.address, **quiet)
        except ConnectionError:
            where = "is running here" if self.address == "auto" else f"answers at {self.address}"
            raise RunError(f"no Ray {where}; start one with ray start --head, or leave --address out.") from None
        except Exception as error:
            raise RunError(f"the Ray at {self.address} cannot be joined: {_said(error)}.") from None


class Place(NamedTuple):
    """A machine of the cluster with room: its number, its name, and how many clients it can compute at a time."""

    node: str
    name: str
    slots: int


def places(cluster: Cluster) -> Iterator[Place]:
    """The machines that are alive, with the room that they have now."""
    ray = find_ray()
    free = ray._private.state.available_resources_per_node()
    for node in ray.nodes():
        if node["Alive"]:
            left = free.get(node["NodeID"], {})
            slots = left.get("CPU", 0.0) / cluster.cpus_per_client
            if cluster.gpus_per_client:
                slots = min(slots, left.get("GPU", 0.0) / cluster.gpus_per_client)
            yield Place(node["NodeID"], _name(node), int(slots + 1e-6))


def require_room(cluster: Cluster) -> None:
    """See that some machine has room for a client; what was just ended may still be counted for a while."""
    ends = time.monotonic() + _ROOM
    while not any(place.slots for place in places(cluster)):
        if time.monotonic() > ends:
            each = f"{cluster.cpus_per_client:g} CPUs"
            if cluster.gpus_per_client:
                each += f" and {cluster.gpus_per_client:g} GPUs"
            raise RunError(f"no machine of the cluster has {each} free for a client; ask for less, or wait.")
        time.sleep(0.2)


def _name(node: dict[str, Any]) -> str:
    address = str(node["NodeManagerAddress"])
    host = str(node.get("NodeManagerHostname", ""))
    return f"{host} ({address})" if host and host != address else address


def on_node(node: str) -> Any:
    """Tells Ray to run something on this machine and on no other."""
    return find_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def find_ray() -> Any:
    """Ray, or one sentence where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"this needs Ray ({error}); install it with: pip install 'laconic[ray]'.") from None
    return ray


def _knock(address: str, door: str) -> None:
    """See that somebody is there who speaks as Ray does: Ray itself would try for minutes.

    `door` is what Ray makes of the address: it calls this machine by a name that others know.
    """
    host, _, port = door.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER) as line:
            if os.environ.get("RAY_USE_TLS", "0") != "1":
                line.sendall(_HELLO)
                if line.recv(9, socket.MSG_WAITALL)[3:4] != _SETTINGS:
                    raise RunError(f"who answers at {address} is no Ray; is this its port?")
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise RunError(f"no Ray answers at {address} ({said.lower()}); is it running, and is this its port?") from None


def _said(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(". ")


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes over SIGTERM; it stays with whoever had it."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
