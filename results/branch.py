"""A run that goes on from the first rounds of another: LG-FedAvg's phase A is FedAvg, bit for bit.

python results/branch.py RUN ROUND FILE.toml OUT NAME    OUT/NAME has RUN's rounds up to ROUND; go on with --resume
python results/branch.py RUN ROUND weights.safetensors   the model of RUN (in phase A) at ROUND

RUN must have a checkpoint of that round. Both runs must agree in seed, data, model and in the settings of phase A.
"""

import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from laconic.config import experiment_from, read_table
from laconic.core import subtree
from laconic.engine import Checkpoints, RunDirectory, State
from laconic.engine.store import pack


def state_at(run: Path, number: int) -> State:
    """What a checkpoint holds."""
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "checkpoints"
        alone.mkdir()
        for kind in ("json", "safetensors"):
            shutil.copy(run / "checkpoints" / f"round-{number:06d}.{kind}", alone)
        found = Checkpoints(alone).load()
    assert found is not None
    return found[0]


def main(run: Path, number: int, target: Path, out: Path | None = None, name: str = "") -> None:
    """Write the weights, or a folder that can be resumed."""
    state = state_at(run, number)
    whole = subtree("whole", state.server)
    if out is None:
        target.write_bytes(pack(subtree("w", whole)))
        return
    seed = tomllib.loads((run / "config.toml").read_text())["run"]["seed"]
    experiment = experiment_from(read_table(target, [f"run.name={name}", f"run.seed={seed}"]))
    if experiment.simulation.state.server.keys() != state.server.keys():
        state.server = whole  # a method without phases
    assert experiment.simulation.state.server.keys() == state.server.keys()
    state.local = {}
    directory = RunDirectory(out, name)
    directory.open(experiment.config, resume=False)
    written = 0
    for line in (run / "metrics.jsonl").read_text().splitlines()[:number]:
        # A device's own model means something else in another method.
        record = {key: value for key, value in json.loads(line).items() if not key.startswith("local_")}
        written = directory.append(record)
    directory.checkpoints.save(state, {"metrics_bytes": written})
    directory.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(Path, sys.argv[4:5]), *sys.argv[5:])
