"""What laconic adds to Flower's own time per round, for a trivial model, on this machine.

Both apps run on one deployment: a SuperLink and two SuperNodes on loopback. The bare app is what a Flower user would
write by hand: it imports torch, takes one step of a tiny linear model on the digits, and sends its weights as an array;
its server averages them with Flower's own `send_and_receive`. Ours is `fedavg` on the same data, with its frames,
checks, checkpoints and evaluations. Besides, the bytes that pass between nodes and SuperLink are counted by a relay in
between, for payloads of two sizes: what is more than the payload is the transport's.

    python -m benchmarks.flower [--rounds 8] [--overhead]      exits with 1 where ours takes more than 5 % longer
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.deploy.stack import Stack, wait_for

BARE = """
import json, time
from pathlib import Path
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    import torch
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = torch.nn.functional.cross_entropy(model(torch.tensor(x[:100] / 16).float()), torch.tensor(y[:100]))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)


@server.main()
def main(grid, context):
    import torch

    state, rounds = torch.nn.Linear(64, 10).state_dict(), int(context.run_config["rounds"])
    seconds = []
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    for number in range(rounds):
        began = time.perf_counter()
        content = RecordDict({"arrays": ArrayRecord(state)})
        out = [Message(content, dst_node_id=n, message_type="train", group_id=str(number)) for n in grid.get_node_ids()]
        replies = [r.content["arrays"].to_torch_state_dict() for r in grid.send_and_receive(out)]
        state = {name: sum(r[name] for r in replies) / len(replies) for name in state}
        seconds.append(time.perf_counter() - began)
    Path(context.run_config["out"]).write_text(json.dumps(seconds))
"""


def table(name: str, rounds: int) -> dict[str, Any]:
    return {
        "run": {"name": name, "rounds": rounds, "cohort": 2, "eval_every": rounds, "workers": 0},
        "data": {"source": "digits", "clients": 2},
        "model": {"name": "mlp", "hidden": []},
        "method": {"name": "fedavg", "local_steps": 1},
        "deploy": {"deadline": 300.0},
    }


def bare(stack: Stack, rounds: int) -> list[float]:
    """Seconds of the bare app's rounds; the first pays for what is only started once."""
    app, result = stack.folder / "bare", stack.folder / "bare.json"
    app.mkdir()
    (app / "bare.py").write_text(BARE)
    project = (stack.app / "pyproject.toml").read_text()
    project = project.replace("laconic_server:app", "bare:server").replace("laconic_client:app", "bare:client")
    project = project.replace('out = "runs"', f'out = "{result}"\nrounds = {rounds}')
    (app / "pyproject.toml").write_text(project)
    script = (stack.app / "submit.sh").read_text().replace('flwr run "$HERE"', f'flwr run "{app}"')
    (stack.app / "bare.sh").write_text(script)
    stack.start("bare", "sh", str(stack.app / "bare.sh"))
    wait_for("the bare run", result.exists, 1200)
    return list(json.loads(result.read_text()))


def ours(stack: Stack, rounds: int) -> list[float]:
    """Seconds of our rounds."""
    stack.submit(table("ours", rounds))
    stack.finished("ours", 1200)
    return [record["seconds"] for record in stack.records("ours")]


class Counting:
    """A relay that counts: nodes call it, it calls the SuperLink."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return  # one of the two is being stopped
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._copy, args=(source, sink, way), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


def overhead(stack: Stack, counting: Counting, rounds: int) -> tuple[float, float]:
    """Bytes beside the payloads, up and down, per client and round."""
    stack.submit(table("warm", 1))
    stack.finished("warm", 1200)
    up, down = counting.up, counting.down
    stack.submit(table("counted", rounds))
    summary = stack.finished("counted", 1200)
    messages = 2 * rounds
    return (
        (counting.up - up - summary["bytes_up"]) / messages,
        (counting.down - down - summary["bytes_down"]) / messages,
    )


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--overhead", action="store_true", help="count the transport's bytes too")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder), table("ours", options.rounds))
        counting = Counting(stack.port) if options.overhead else None
        if counting is not None:
            script = stack.app / "supernode.sh"
            script.write_text(script.read_text().replace('"$ADDRESS"', f"127.0.0.1:{counting.port}"))
        try:
            stack.up()
            theirs, mine = bare(stack, options.rounds), ours(stack, options.rounds)
            if counting is not None:
                up, down = overhead(stack, counting, options.rounds)
                print(f"transport beside the payload, per client and round: {up:,.0f} B up, {down:,.0f} B down")
        finally:
            left = stack.down()
            if counting is not None:
                counting.close()
    first, second = statistics.median(theirs[1:]), statistics.median(mine[1:])
    ratio = second / first
    print(
        f"seconds per round (median of {options.rounds - 1}): Flower alone {first:.2f}, laconic on Flower {second:.2f}"
    )
    print(f"all: Flower alone {[round(s, 2) for s in theirs]}, laconic on Flower {[round(s, 2) for s in mine]}")
    print(
        f"{'PASS' if ratio <= 1.05 and not left else 'FAIL'}: ratio {ratio:.3f} (at most 1.05), processes left {left}"
    )
    return 0 if ratio <= 1.05 and not left else 1


if __name__ == "__main__":
    sys.exit(main())
