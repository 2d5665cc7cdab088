"""A run that goes on from the first rounds of another: LG-FedAvg's phase A is FedAvg, bit for bit.

python results/branch.py RUN ROUND FILE.toml OUT NAME    OUT/NAME has RUN's rounds up to ROUND; go on with --resume
python results/branch.py RUN ROUND weights.safetensors   the model of RUN (in phase A) at ROUND

RUN must have a checkpoint of that round. Both runs must agree in seed, data, model and in the settings of phase A.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

from laconic.config import experiment_from, read_table
from laconic.core import subtree
from laconic.engine import Checkpoints, Record, RunDirectory, State
from laconic.engine.store import pack
from laconic.experiment import Experiment
from laconic.methods import Solver


def state_at(run: Path, number: int) -> State:
    """What a checkpoint holds."""
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "checkpoints"
        alone.mkdir()
        for kind in ("json", "safetensors"):
            shutil.copy(run / "checkpoints" / f"round-{number:06d}.{kind}", alone)
        found = Checkpoints(alone).load()
    if found is None:
        sys.exit(f"{run} has no readable checkpoint of round {number}.")
    return found[0]


def first_phase(experiment: Experiment) -> tuple[object, ...]:
    """All that decides a run up to the end of phase A: FedAvg (FedProx, with `mu`) by the solver's settings."""
    agreement, config = experiment.simulation.agreement, experiment.config
    solver = [agreement.settings.get(field.name) for field in fields(Solver)]
    method = solver, agreement.settings.get("weighting"), agreement.settings.get("mu", 0.0)
    settings = [config[section] for section in ("data", "model", "link")]
    return method, *settings, config["run"]["seed"], config["run"]["cohort"]


def main(run: Path, number: int, target: Path, out: Path | None = None, name: str = "") -> None:
    """Write the weights, or a folder that can be resumed."""
    state = state_at(run, number)
    whole = subtree("whole", state.server)
    if out is None:
        target.write_bytes(pack(subtree("w", whole)))
        return
    source = experiment_from(read_table(run / "config.toml"))
    seed, layout = (source.config["run"][key] for key in ("seed", "layout"))
    changes = [f"run.name={name}", f"run.seed={seed}", f"run.layout={layout}"]
    experiment = experiment_from(read_table(target, changes))
    if first_phase(source) != first_phase(experiment):
        sys.exit(f"{run} and {target} differ in their data, model, link, cohort or in the method of the first phase.")
    if experiment.simulation.state.server.keys() != state.server.keys():
        state.server = whole  # a method without phases
    state.local = {}
    directory = RunDirectory(out, name)
    directory.open(experiment.config, resume=False)
    written = 0
    for line in (run / "metrics.jsonl").read_text().splitlines()[:number]:
        # A device's own model means something else in another method.
        record = Record.read(json.loads(line))
        found = {name: value for name, value in record.evaluation.items() if not name.startswith("local_")}
        written = directory.append(replace(record, evaluation=found))
    directory.checkpoints.save(state, {"metrics_bytes": written})
    directory.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(Path, sys.argv[4:5]), *sys.argv[5:])
