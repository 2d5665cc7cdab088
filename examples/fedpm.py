"""FedPM: clients learn which weights of a frozen random network to keep, and send a bit for each."""

import torch

import laconic as lc


def main(rounds: int = 15) -> None:
    data = lc.data.digits(clients=10)
    common = {"data": data, "model": "mlp", "rounds": rounds, "cohort": 10, "eval_every": 5}
    solver = lc.Solver(optimizer="adam", lr=0.1, local_epochs=3, batch_size=32)  # of the scores
    settings = {"solver": solver}
    runs = {
        "fedavg, float32": lc.fit(method=lc.fedavg(), **common),
        "fedpm": lc.fit(method=lc.fedpm(**settings), **common),
        "fedpm, one frequency": lc.fit(method=lc.fedpm(**settings), up="mask:model=global", **common),
        "fedpm, mrc": lc.fit(method=lc.fedpm(**settings), up="mrc", **common),
        "fedmask": lc.fit(method=lc.fedmask(**settings), **common),
    }
    print(f"{'':22}{'accuracy':>9}{'bits up':>9}{'down':>7}   per parameter and message")
    for name, run in runs.items():
        s = run.summary
        up, down = s["bits_per_parameter_up"], s["bits_per_parameter_down"]
        print(f"{name:22}{s['global_accuracy']:9.3f}{up:9.2f}{down:7.2f}")

    # The server's belief makes masks cheaper as it becomes decided; by their own frequency of ones they cost a bit.
    for record in runs["fedpm"].history[::5]:
        said = record.clients
        print(
            f"round {record['round']:2}: a mask surprises the server by {said['mask_cross_entropy']:.2f} bits per "
            f"parameter, its own entropy is {said['mask_entropy']:.2f}"
        )

    # The model is eight bytes of seed and a mask.
    summary = runs["fedpm"].summary
    size = summary["parameters"] * summary["model_bits_per_parameter"] / 8 + 8
    weights = torch.cat([p.flatten() for p in runs["fedpm"].model.parameters()])
    print(f"{size:.0f} bytes for {len(weights)} weights, {100 * float((weights == 0).float().mean()):.0f} % of them 0")


if __name__ == "__main__":
    main()
