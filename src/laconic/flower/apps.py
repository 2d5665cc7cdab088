"""The two halves of a Flower app, and the same app on Ray."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

from rich.console import Console

from laconic.config import experiment_from, read_table
from laconic.core import ConfigError, RunError
from laconic.engine import Observer, Run, RunDirectory
from laconic.experiment import Experiment
from laconic.flower.node import answer_values
from laconic.flower.nodes import Nodes, Transport, TransportReply
from laconic.flower.registry import registered
from laconic.progress import Display

Table = Mapping[str, Mapping[str, Any]]
_RECORD = "laconic"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment that Flower's processes should have: nothing is reported, fetched or installed unasked."""


def client_app(config: Path | str | Table, *, mods: Sequence[Any] = (), state: Path | None = None) -> Any:
    """A Flower `ClientApp` for the run that a TOML file (or its sections) describes.

    The node's configuration says which client it is (`partition-id`), and may name a source of its own data
    (`data="module:function"`) and a folder for the client's own states (`state="/var/lib/laconic"`; `state` unless
    given).
    """
    flwr = _flwr()
    table = _table(config)
    app = flwr.clientapp.ClientApp(mods=list(mods))

    def answer(message: Any, context: Any) -> Any:
        record = context.state[_RECORD] if _RECORD in context.state else flwr.app.ConfigRecord()
        values = message.content.get(_RECORD, {})
        node = {**({} if state is None else {"state": str(state)}), **context.node_config}
        reply = answer_values(table, node, values, record)
        context.state[_RECORD] = record
        return flwr.app.Message(flwr.app.RecordDict({_RECORD: flwr.app.ConfigRecord(reply)}), reply_to=message)

    for kind in (app.query, app.train, app.evaluate):
        kind()(answer)
    return app


def server_app(config: Path | str | Table, *, out: Path | str = "runs", observer: Observer | None = None) -> Any:
    """A Flower `ServerApp` for the run that a TOML file (or its sections) describes.

    The run leaves its files in `out`; where they already hold a part of it, it goes on from there. `out`, `resume` and
    `overwrite` may also be given by `flwr run --run-config`.
    """
    flwr = _flwr()
    table = _table(config)
    app = flwr.serverapp.ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        settings = context.run_config
        folder = Path(str(settings.get("out", out)))
        overwrite = bool(settings.get("overwrite", False))
        resume = bool(settings.get("resume", True)) and not overwrite
        watching = observer or Display(Console(stderr=True))  # Flower sends it to whoever asked for the run's log
        serve(
            GridTransport(grid),
            experiment_from(table),
            out=folder,
            resume=resume,
            overwrite=overwrite,
            observer=watching,
            registered=None if isinstance(config, Mapping) else registered(Path(config).parent),
        )

    return app


class GridTransport:
    """A Flower grid as a transport."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def nodes(self) -> Iterable[int]:
        """The nodes that are connected."""
        return map(int, self._grid.get_node_ids())

    def push(self, node: int, values: Mapping[str, Any], *, kind: str, round: int, seconds: float) -> str | None:
        """Send a message of one record."""
        from flwr.app import ConfigRecord, Message, RecordDict

        content = RecordDict({_RECORD: ConfigRecord(dict(values))})
        message = Message(content, dst_node_id=node, message_type=kind, ttl=seconds + 1, group_id=str(round))
        # One at a time: a grid may leave out of its answer what it did not take, and the rest would be mistaken.
        return next(iter(self._grid.push_messages([message])), None)

    def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
        """The replies that have come."""
        for message in self._grid.pull_messages(list(names)):
            about = message.metadata
            if message.has_error():
                said = f"Flower says: {message.error.reason}"
                yield TransportReply(about.reply_to_message_id, about.src_node_id, None, said)
            else:
                values = message.content.get(_RECORD, {})
                yield TransportReply(about.reply_to_message_id, about.src_node_id, values)


def serve(
    transport: Transport,
    experiment: Experiment,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    networked: bool = True,
    stop: Event | None = None,
    registered: Mapping[int, int] | None = None,
) -> Run:
    """Run an experiment whose clients are nodes (`registered`: the node of each).

    Every round is kept: on real machines, rounds are dear.
    """
    deadline = experiment.deployment.deadline
    floor = None
    if out is not None:
        floor = RunDirectory(out, experiment.name).checkpoints.floor
    experiment.simulation.secret_draws = True
    experiment.simulation.carrier = lambda simulation: Nodes(
        transport, simulation, deadline=deadline, floor=floor, networked=networked, stop=stop, registered=registered
    )
    return replace(experiment, checkpoint_every=1).run(out=out, resume=resume, overwrite=overwrite, observer=observer)


def on_ray(
    table: Table,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    cpus: int = 2,
) -> Run:
    """Run on Flower's simulation: clients are actors of Ray, on this machine."""
    # Ray lets its actors give way to everything else on the machine; here they are the work itself.
    own = {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_ADDRESS": "local"}
    for name, value in {**QUIET, **own}.items():
        os.environ.setdefault(name, value)
    flwr = _flwr()
    experiment = experiment_from(table)  # what is wrong is said before Ray starts
    stop, ended = Event(), []
    app = flwr.serverapp.ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        try:
            run: Any = serve(
                GridTransport(grid),
                experiment,
                out=out,
                resume=resume,
                overwrite=overwrite,
                observer=observer,
                networked=False,
                stop=stop,
            )
        except BaseException as error:  # carried to the caller's thread, which raises it
            run = error
        ended.append(run)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    with _stopping(stop):
        flwr.simulation.run_simulation(
            app,
            # Beside the checkpoints that mean them: what Flower keeps would not outlive this process.
            client_app(table, state=None if out is None else (out / experiment.name / "nodes").resolve()),
            num_supernodes=experiment.simulation.clients.num_clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": cpus, "include_dashboard": False, "log_to_driver": False},
            },
        )
    if not ended:
        raise RunError("Flower's simulation ended before the run did; see its messages above.")
    (result,) = ended
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]


@contextmanager
def _stopping(stop: Event) -> Iterator[None]:
    """Let Ctrl-C stop the run between two looks for replies: raised in Flower's own loop, it would wait forever."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flwr() -> Any:
    """Flower, or one sentence where it is not installed."""
    try:
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
        import flwr.simulation
    except ImportError as error:
        raise ConfigError(f"this needs Flower ({error}); install it with: pip install 'laconic[flower]'.") from None
    return flwr


def _table(config: Path | str | Table) -> Table:
    return read_table(Path(config)) if isinstance(config, Path | str) else config
