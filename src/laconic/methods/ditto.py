"""Ditto: FedAvg, and beside it a model for every client that is pulled to FedAvg's.

| symbol | here |
|---|---|
| w | the server's weights: FedAvg's, bit for bit |
| v_i | a client's own weights (personal state); before its first local update, w |
| λ | `lambda_`; 0 is every client by itself |

    client:  min_v  L_i(v) + (λ/2)‖v − w‖²,  from where v_i stood, on the mini-batches that w is fitted on

Li et al., "Ditto: fair and robust federated learning through personalization", 2021.
"""

from __future__ import annotations

from laconic.core import Task, Tree, isolated, prefixed, read_state, subtree
from laconic.methods.em import Companion, Fitted, Learnt
from laconic.methods.gaussian import Gaussian
from laconic.methods.solvers import Solver, solve


def own_models(lambda_: float) -> Companion:
    """A second fit in every local update; nothing of it is sent."""
    prior = Gaussian(lambda_)

    def model(centre: Tree, personal: Tree, task: Task) -> Tree:
        return {**centre, **subtree("v", personal)}

    def learn(seen: Fitted, task: Task, solver: Solver) -> Learnt:
        module, key = task.load(model(seen.centre, seen.personal, task)), seen.key
        # The same draws of dropout as in the first fit; leaves that KeepLocal keeps were trained there.
        with isolated(key.fold_in("torch")), task.held(frozen=True):
            batches, pull = key.fold_in("batches"), prior.pull(seen.centre, task)
            solve(task, seen.data.train, solver, round=seen.client.round, key=batches, pull=pull)
        state = read_state(module)
        return Learnt(prefixed("v", {name: state[name].cpu().clone() for name in task.moving}))

    return Companion(learn=learn, model=model)
