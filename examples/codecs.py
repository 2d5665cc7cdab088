"""One method, many codecs: what a message costs and what that does to the accuracy."""

import laconic as lc

# (up, down); a codec is text here and in TOML, or an object: lc.codecs.topk(0.01) | lc.codecs.eden(4)
LINKS = [
    ("float32", "float32"),
    ("int8", "float32"),
    ("eden:bits=2", "float32"),
    ("drive", "float32"),
    ("signsgd", "float32"),
    ("ef(signsgd)", "float32"),
    ("ef(topk:fraction=0.02 | eden:bits=4)", "float32"),
    ("ef(lowrank:rank=2 | int8)", "float32"),
    ("by_leaf(*.bias: float32, *: eden:bits=1)", "float32"),
    ("eden:bits=2", "eden:bits=4"),
    ("lean:bits=0.5", "float32"),
    ("lean:bits=0.5", "lean:bits=0.5"),
]


def main(rounds: int = 15) -> None:
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 1.0})
    method = lc.fedavg(solver=lc.Solver(lr=0.2, local_epochs=2))
    print(f"{'up':42}{'down':14}{'accuracy':>9}{'bits up':>9}{'down':>7}   per parameter and message")
    for up, down in LINKS:
        run = lc.fit(method=method, data=data, up=up, down=down, rounds=rounds, cohort=10, eval_every=rounds, workers=0)
        summary = run.summary
        print(
            f"{up:42}{down:14}{summary['global_accuracy']:9.3f}"
            f"{summary['bits_per_parameter_up']:9.2f}{summary['bits_per_parameter_down']:7.2f}"
        )


if __name__ == "__main__":
    main()
