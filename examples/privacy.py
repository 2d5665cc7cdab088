"""Differential privacy for masks: what a mask tells about a client, and what noise does to the estimate of θ."""

import torch

from laconic.core import Key
from laconic.privacy import MaskPrivacy, draw


def main(clients: int = 2000) -> None:
    key = Key.from_seed(0)
    theta = torch.tensor([0.25, 0.4, 0.5, 0.6, 0.75], dtype=torch.float64)  # what all clients hold
    print(f"{'ε asked':>8}{'σ':>8}{'ε of a mask':>13}{'of 10 masks':>13}{'error':>9}{'corrected':>11}")
    for epsilon in (8.0, 4.0, 2.0, 1.0):
        privacy = MaskPrivacy(c=0.2, epsilon=epsilon, delta=1e-4, calibration="mask").bind(len(theta))
        masks = torch.stack(
            [
                draw(privacy.randomize(theta, key.fold_in("noise", k)), key.fold_in("bits", k)).double()
                for k in range(clients)
            ]
        )
        mean = masks.mean(dim=0)
        once, often = privacy.spent(rounds=1), privacy.spent(rounds=10)
        print(
            f"{epsilon:8.1f}{privacy.sigma:8.3f}{once.epsilon:13.2f}{often.epsilon:13.2f}"
            f"{float((mean - theta).abs().max()):9.3f}{float((privacy.corrected(mean) - theta).abs().max()):11.3f}"
        )


if __name__ == "__main__":
    main()
