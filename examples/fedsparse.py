"""FedSparse on the digits: filters and neurons that do not pay are closed, and the model that is left is smaller.

Compare it with FedAvg under equal conditions, then store it and load it again.
"""

import tempfile
from pathlib import Path

import laconic as lc


def main(rounds: int = 20) -> None:
    """Train both, print what each sent and what is left of the model."""
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 1.0})
    adam = lc.ServerOptimizer("adam", lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        for method in (lc.fedopt(server=adam), lc.fedsparse(sparsity="mid", server=adam)):
            run = lc.fit(
                method=method, data=data, rounds=rounds, cohort=10, init="glorot", out=folder, name=method.name
            )
            summary = run.summary
            print(
                f"{method.name:10s} {100 * summary['global_accuracy']:5.1f} %  "
                f"{(summary['bytes_up'] + summary['bytes_down']) / 1e6:5.2f} MB both ways  "
                f"{summary['final_parameters']:5d} of {summary['parameters']} parameters left"
            )
        file = Path(folder) / "fedsparse" / "model.lac"
        small = lc.load(file)  # an ordinary module, without the closed neurons
        short = lc.export(file.parent, format="lac", values="int8")
        print(small)
        print(f"{file.stat().st_size} bytes as float32, {short.num_bytes} as int8, {short.whole_bytes} whole")


if __name__ == "__main__":
    main()
