"""Synchronous variational dropout: steps, masks, messages, and the checks that its specification lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.methods.conftest import inside
from torch import Tensor, nn

from laconic.codecs import parse
from laconic.core import (
    ALONE,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Key,
    Part,
    PayloadError,
    Population,
    Reply,
    Shared,
    Task,
    Tree,
    Update,
    prefixed,
    subtree,
)
from laconic.data import Federation
from laconic.engine import (
    Agreement,
    Link,
    Schedule,
    Simulation,
    client_round,
    open_reply,
    receive,
    send,
    server_round,
    to_everyone,
)
from laconic.evaluations import EVALUATIONS
from laconic.methods import Solver, Synchronous, vardrop
from laconic.methods.synchronous import Moments
from laconic.models import num_parameters, resnet18
from laconic.models.variational import Noise, kl, noise_of, variational
from laconic.testing import small_federation, small_task

KEY = Key.from_seed(5)
FLOAT32 = parse("float32")
ALL = 7.9  # a threshold that masks next to nothing


def _solver(**settings: Any) -> Solver:
    return Solver(**{"optimizer": "adam", "lr": 1e-2, "local_steps": 1, "batch_size": 8, **settings})


def _task() -> Task:
    return Task(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))


def _bound(task: Task | None = None, *, solver: Solver | None = None, **settings: Any) -> Synchronous:
    method = inside(vardrop(solver=solver or _solver(), **settings).bind(task or _task()))
    assert isinstance(method, Synchronous)
    return method


def _part(count: int, seed: int = 0) -> Part:
    generator = Key.from_seed(seed).fold_in("examples").torch()
    x = torch.randn(count, 4, generator=generator)
    return Part.whole(x, (x[:, :3]).argmax(dim=1))


def _turn(method: Synchronous, held: Tree, part: Part, client: int = 0) -> tuple[Reply, Tree]:
    info = ClientInfo(client, 1, len(part))
    personal = method.init_client(KEY.fold_in("init_client", client))
    update = method.client_update(held, personal, ClientData(part, part), info, KEY.fold_in(client))
    return Reply(info, update.message, held), update.personal


def _with_masks(method: Synchronous, held: Tree, masks: Tree, value: float = 1.0, number: int | None = None) -> Tree:
    """A step with a gradient of `value` on these masks."""
    step = torch.tensor([int(held["#step"][0]) + 1 if number is None else number, 10])
    ones = {name: torch.full(leaf.shape, value) for name, leaf in method.form.moving.items()}
    return {"#step": step, **method.form.packed(ones, masks)}


def _some(method: Synchronous, share: float) -> Tree:
    generator = KEY.fold_in("masks").torch()
    return {name: torch.rand(size, generator=generator) < share for name, size in method.form.sizes.items()}


# --- (c) one device is centralised training --------------------------------------------------------------------------


@pytest.mark.parametrize("share_alpha", [False, True])
def test_one_device_is_centralised_training(share_alpha: bool) -> None:
    part, rounds, lr = _part(20), 12, 1e-2
    federation = Federation.from_clients([part.tensors()], part.tensors(), classes=3, name="one")
    method = vardrop(
        share_alpha=share_alpha,
        threshold=ALL,
        first_log_sigma2=-10.0,
        sigma_lr=3.0,
        kl_scale=2.0,
        solver=_solver(lr=lr),
    )
    schedule = Schedule(rounds=rounds, cohort=1, eval_every=rounds)
    link = Link(FLOAT32, FLOAT32)
    run = Simulation(method, _task(), federation, link, schedule, seed=0, workers=0, evaluations=EVALUATIONS)
    agreement = run.agreement
    first = {name: leaf.clone() for name, leaf in subtree("held/w", run.state.server).items()}
    for _ in run:
        pass
    data = federation.client(0).train
    form = variational(_task().build())
    module = form.module
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(first.get(name, torch.full_like(parameter, -10.0)))
    sigmas = [p for n, p in module.named_parameters() if n.endswith("log_sigma2")]
    theta = [p for n, p in module.named_parameters() if not n.endswith("log_sigma2")]
    optimizer = torch.optim.Adam([{"params": theta, "lr": lr}, {"params": sigmas, "lr": 3.0 * lr}])
    order = agreement.key.fold_in("init_client", 0)
    x, y = data.tensors()
    stream = torch.cat([torch.from_numpy(order.fold_in("epoch", e).numpy().permutation(len(x))) for e in range(6)])
    for step in range(rounds):
        rows = stream[step * 8 : step * 8 + 8]
        form.noise.generator = agreement.client_key(ClientInfo(0, step + 1, 0)).fold_in("noise").torch()
        loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
        for layer in (module[0], module[2]):
            loss = loss + 2.0 / len(x) * kl(log_alpha_of(layer)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    predictor = run.method.global_model(run.state.server)
    for name, parameter in predictor.named_parameters():
        torch.testing.assert_close(parameter, dict(module.named_parameters())[name], rtol=1e-4, atol=1e-6)
    assert any(float((first[n] - p.detach()).abs().max()) > 0.05 for n, p in predictor.named_parameters())


def log_alpha_of(layer: nn.Module) -> Tensor:
    """With autograd: log_alpha works in place."""
    return (layer.log_sigma2 - torch.log(layer.weight**2 + 1e-8)).clamp(-8, 8)


# --- (d) N devices are one with the batches put together -------------------------------------------------------------


def test_devices_are_one_device_with_the_concatenated_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    method = _bound(threshold=ALL, kl_scale=0.0)
    held = method.first_held(method.init(KEY))
    noise = {c: [torch.randn(8, 6, generator=KEY.fold_in(c).torch()), torch.randn(8, 3)] for c in range(2)}
    noise[2] = [torch.cat([noise[0][i], noise[1][i]]) for i in range(2)]
    script: list[Tensor] = []

    def drawn(self: Noise, mean: Tensor, variance: Tensor) -> Tensor:
        return mean + (variance + 1e-8).sqrt() * script.pop(0)

    monkeypatch.setattr(Noise, "drawn", drawn)
    parts = [_part(8, seed) for seed in (1, 2)]
    replies = []
    orders = []
    for client, part in enumerate(parts):
        script[:] = noise[client]
        reply, personal = _turn(method, held, part, client)
        replies.append(reply)
        order = Key(bytes(personal["#seed"].tolist())).fold_in("epoch", 0).numpy().permutation(8)
        orders.append(torch.from_numpy(order))
    sent = subtree("sent", method.server_update(method.init(KEY), replies, KEY))
    script[:] = noise[2]
    x = torch.cat([part.x[order] for part, order in zip(parts, orders, strict=True)])
    y = torch.cat([part.y[order] for part, order in zip(parts, orders, strict=True)])
    module = method.form.task.load({**subtree("w", held), **method.form.first_sigmas()})
    noise_of(module).generator = KEY.torch()
    names = list(method.task.trainable)
    own = dict(module.named_parameters())
    loss = nn.functional.cross_entropy(module(x), y)
    gradients = torch.autograd.grad(loss, [own[name] for name in names])
    noise_of(module).generator = None
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(sent[name].reshape(gradient.shape), gradient, rtol=1e-5, atol=1e-7)


# --- (e) replicas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("down", ["float32", "eden:bits=4"])
@pytest.mark.parametrize("share_alpha", [False, True])
def test_replicas_are_the_same_after_every_iteration(down: str, share_alpha: bool) -> None:
    """Every device by itself, as in a deployment: with its own replica, from frames alone."""
    method = vardrop(share_alpha=share_alpha, first_log_sigma2=-1.5, sigma_lr=10.0, check_every=2, solver=_solver())
    agreement = Agreement(method.bind(small_task(batch_norm=True)), Link(FLOAT32, parse(down)), Key.from_seed(1))
    federation = small_federation(clients=3)
    server = agreement.method.init(agreement.key.fold_in("init"))
    known = agreement.first_held()
    devices = {c: agreement.first_held() for c in range(3)}
    personal = {c: agreement.method.init_client(agreement.key.fold_in("init_client", c)) for c in range(3)}
    sent = []
    for number in range(1, 7):
        frame, (known, _) = send(agreement, server, to_everyone(number), known)
        replies = []
        for c in devices:
            devices[c] = receive(agreement, frame, to_everyone(number), devices[c]).held
            turn = client_round(agreement, devices[c], ClientInfo(c, number, 0), personal[c], {}, federation.client(c))
            personal[c] = turn.personal
            replies.append(open_reply(agreement, turn.frame, known, ClientInfo(c, number, 0)))
            sent.append(turn.metrics["gradients_sent"])
        for device in devices.values():
            assert list(device) == list(known)
            assert all(torch.equal(device[name], known[name]) for name in known)
        server = server_round(agreement, server, replies, number)
    assert min(sent) < 0.9  # there was something to mask


def test_a_diverged_device_is_refused_by_the_first_leaf_that_differs() -> None:
    method = _bound(check_every=1)
    held = method.first_held(method.init(KEY))
    spoilt = {**held, "w/2.weight": held["w/2.weight"] + 1e-7, "w/2.bias": held["w/2.bias"] + 1}
    reply, _ = _turn(method, spoilt, _part(8))
    with pytest.raises(PayloadError, match=r"differs from the others', first in '2\.weight'"):
        method.verify(replace(reply, received=held))
    good, _ = _turn(method, held, _part(8))
    method.verify(good)


def test_a_diverged_device_costs_its_own_reply() -> None:
    method = vardrop(solver=_solver(), check_every=2)

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = method.bind(task, population)

        def astray(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
            if client.id == 1 and client.round == 3:
                received = {**received, "w/0.bias": received["w/0.bias"] + 1}
            return bound.client_update(received, personal, data, client, key)

        return replace(bound, client_update=astray)

    schedule = Schedule(rounds=4, cohort=3, eval_every=9)
    wrong, three, link = replace(method, bind=bind), small_federation(clients=3), Link(FLOAT32, FLOAT32)
    run = Simulation(wrong, _task(), three, link, schedule, seed=0, workers=0, evaluations=EVALUATIONS)
    found = {r["round"]: [(x["client"], x["reason"]) for x in r.get("rejections", [])] for r in run}
    assert found == {1: [], 2: [], 3: [(1, "diverged")], 4: []}


def test_checksums_travel_only_when_they_are_due() -> None:
    method = _bound(check_every=3)
    held = method.first_held(method.init(KEY))
    due = ["#checks" in method.message_spec({**held, "#step": torch.tensor([n, 0])}) for n in range(7)]
    assert due == [True, False, False, True, False, False, True]


# --- absorbing -------------------------------------------------------------------------------------------------------


def test_a_step_is_absorbed_once_and_none_may_be_missing() -> None:
    method = _bound()
    held = method.first_held(method.init(KEY))
    sent = _with_masks(method, held, method.form.whole_masks())
    after = method.absorb(held, sent)
    again = method.absorb(after, sent)
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert not torch.equal(after["w/0.weight"], held["w/0.weight"])
    with pytest.raises(PayloadError, match="step 3 cannot follow step 1"):
        method.absorb(after, _with_masks(method, after, method.form.whole_masks(), number=3))


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_nothing_moves_outside_of_the_union(share: float) -> None:
    """(i): neither the value nor Adam's moments, be the step made on all weights or on some."""
    task = Task(lambda: nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 10)))
    method = _bound(task)
    held = method.first_held(method.init(KEY))
    held = method.absorb(held, _with_masks(method, held, method.form.whole_masks()))
    masks = _some(method, share)
    still = method.absorb(held, _with_masks(method, held, masks))
    ghost = _bound(task, ghost_updates=True).absorb(held, _with_masks(method, held, masks))
    for name, mask in masks.items():
        mask = mask.reshape(held[f"w/{name}"].shape)
        assert bool(mask.any())
        assert not bool(mask.all())
        for kind in ("w", "first", "second"):
            before, after = held[f"{kind}/{name}"], still[f"{kind}/{name}"]
            assert torch.equal(before[~mask], after[~mask])
            assert not bool((before[mask] == after[mask]).any())
        moved = ghost[f"w/{name}"]
        assert not bool((held[f"w/{name}"] == moved).any())  # momentum moves what has no gradient
        assert torch.equal(moved[mask], still[f"w/{name}"][mask])


def test_steps_on_few_and_on_all_weights_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    method = _bound()
    held = method.first_held(method.init(KEY))
    held = method.absorb(held, _with_masks(method, held, method.form.whole_masks()))
    sent = _with_masks(method, held, _some(method, 0.5))
    made = []
    for limit in (0.0, 1.0):
        monkeypatch.setattr("laconic.methods.synchronous._DENSE", limit)
        made.append(method.absorb(held, sent))
    for name in made[0]:
        torch.testing.assert_close(made[0][name], made[1][name], rtol=1e-6, atol=0)


def test_adam_is_that_of_torch() -> None:
    parameter = nn.Parameter(torch.randn(30, generator=KEY.torch()))
    mine = Moments(parameter.detach().clone(), torch.zeros(30), torch.zeros(30))
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    for count in range(1, 5):
        gradient = torch.randn(30, generator=KEY.fold_in(count).torch())
        mine = mine.moved(gradient, lr=0.01, count=count)
        parameter.grad = gradient
        optimizer.step()
    assert torch.equal(mine.value, parameter.detach())


def test_the_rate_falls_linearly() -> None:
    method = _bound(decay_rounds=4, solver=_solver(lr=0.8))
    assert [method.rate(step) for step in (1, 2, 4, 5, 9)] == pytest.approx([0.8, 0.6, 0.2, 0.0, 0.0])


# --- masks and averages ----------------------------------------------------------------------------------------------


def test_the_mean_counts_masked_devices_as_zero_and_goes_to_the_union() -> None:
    method = _bound(vote=0.5, solver=_solver(optimizer="sgd", lr=1.0))
    server = method.init(KEY)
    held = method.first_held(server)
    masks = [method.form.whole_masks() for _ in range(4)]
    for tree in masks:
        tree["0.weight"][:2] = False
    masks[0]["0.weight"][1] = True  # one of four
    for tree in masks[1:]:
        tree["0.weight"][5] = False  # kept by one of four, but this time by the first
    ones = {name: torch.ones(leaf.shape) for name, leaf in method.form.moving.items()}
    replies = [Reply(ClientInfo(c, 1, 10), method.form.packed(ones, m), held) for c, m in enumerate(masks)]
    new = method.server_update(server, replies, KEY)
    sent = subtree("sent", new)
    union = sent["#mask/0.weight"]
    assert union.tolist() == [False, True, *[True] * 22]
    assert sent["0.weight"].tolist() == pytest.approx([0.25, 1, 1, 1, 0.25, *[1.0] * 18])
    assert sent["#step"].tolist() == [1, 40]
    kept = new["kept/0.weight"]
    assert kept.tolist() == [False, False, True, True, True, False, *[True] * 18]
    weights = dict(method.global_model(new).named_parameters())
    assert (weights["0.weight"].reshape(-1) == 0).tolist() == (~kept).tolist()
    assert torch.equal(method.artifact(new).tree["0.weight"], weights["0.weight"])
    assert method.metrics(new)["nonzero"] == pytest.approx((24 - 3 + 18) / 42)
    assert method.metrics(new)["nonzero/0"] == pytest.approx(21 / 24)


def test_what_is_masked_everywhere_may_come_back_only_where_sigma_is_private() -> None:
    for share_alpha in (False, True):
        method = _bound(share_alpha=share_alpha, first_log_sigma2=0.0)
        held = method.first_held(method.init(KEY))
        reply, personal = _turn(method, held, _part(8))
        masks = method.form.support(reply.message)
        assert 0 < int(masks["0.weight"].sum()) < 24
        out = ~masks["0.weight"].reshape(6, 4)
        if share_alpha:
            new = method.server_update(prefixed("held", held), [reply], KEY)
            after = method.absorb(held, subtree("sent", new))["w/0.log_sigma2"]
            assert torch.equal(after[out], held["w/0.log_sigma2"][out])
            assert "own/0.log_sigma2" not in personal
        else:
            assert not bool((personal["own/0.log_sigma2"][out] == 0).any())


def test_the_kl_is_weighed_by_the_size_that_is_asked_for() -> None:
    """Where inputs are 0 there is nothing to learn: the gradient of the first layer's log σ² is the KL's alone."""
    part = Part.whole(torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64))
    slopes = {}
    for size in ("local", "federation"):
        method = _bound(share_alpha=True, kl_size=size, threshold=ALL, first_log_sigma2=-6.0)
        held = {**method.first_held(method.init(KEY)), "#step": torch.tensor([1, 40])}
        reply, _ = _turn(method, held, part)
        slopes[size] = reply.message["0.log_sigma2"]
    assert float(slopes["local"].abs().min()) > 0
    torch.testing.assert_close(slopes["local"], 4 * slopes["federation"])


def test_the_warm_up_leaves_the_prior_out_at_first() -> None:
    posterior = _bound(kl_start=2, kl_full=4, kl_scale=3).posterior
    assert [posterior.kl_weight(epoch, 6) for epoch in (0, 1.9, 2, 3, 4, 9)] == pytest.approx([0, 0, 0, 0.25, 0.5, 0.5])
    assert [_bound(kl_start=2, kl_full=2).posterior.kl_weight(e, 1) for e in (1, 2)] == [0, 1]


# --- messages --------------------------------------------------------------------------------------------------------


def _frame_bytes(method: Synchronous, held: Tree, masks: Tree) -> int:
    ones = {name: torch.ones(leaf.shape) for name, leaf in method.form.moving.items()}
    spec = method.message_spec({**held, "#step": torch.tensor([1, 0])})
    message = method.form.packed(ones, masks)
    blob, _ = FLOAT32.encode({name: message[name] for name in spec}, Shared.of(spec, KEY, held), {})
    decoded = FLOAT32.decode(blob, spec, Shared.of(spec, KEY, held))
    assert all(torch.equal(decoded[name], message[name]) for name in spec)
    return len(blob)


def test_bytes_fall_with_sparsity_and_are_four_per_value_and_a_bit_per_weight() -> None:
    method = _bound(Task(lambda: nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 10))))
    held = method.first_held(method.init(KEY))
    sizes = {share: _frame_bytes(method, held, _some(method, share)) for share in (0.0, 0.01, 0.1, 0.5, 1.0)}
    assert list(sizes.values()) == sorted(set(sizes.values()))
    assert sizes[1.0] == 4 * (2400 + 50) + 2400 // 8
    assert sizes[0.0] == 4 * 50 + 2400 // 8


def test_sharing_alpha_costs_twice_as_much() -> None:
    task = Task(lambda: nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 10)))
    sizes = []
    for share_alpha in (False, True):
        method = _bound(task, share_alpha=share_alpha)
        held = method.first_held(method.init(KEY))
        masks = _some(method, 0.5)
        ones = {name: torch.ones(leaf.shape) for name, leaf in method.form.moving.items()}
        sizes.append((_frame_bytes(method, held, masks), method.paper_bytes(held, method.form.packed(ones, masks))))
    assert 1.85 < sizes[1][0] / sizes[0][0] < 2
    assert 1.9 < sizes[1][1] / sizes[0][1] < 2


def test_the_last_union_is_side_information_both_ways() -> None:
    method = _bound()
    held = method.first_held(method.init(KEY))
    masks = _some(method, 0.5)
    held = method.absorb(held, _with_masks(method, held, masks))
    for spec in (method.message_spec(held), method.step_spec(held)):
        for name, mask in masks.items():
            expected = spec[f"#mask/{name}"].expected
            assert expected is not None
            assert torch.equal(expected > 0.5, mask)
    assert method.broadcast_spec(to_everyone(1), KEY)["#mask/0.weight"].expected is None


class _Volume:
    """A paper's row: `paper_bytes` of one dense exchange, times the iterations."""

    def __init__(self, task: Task) -> None:
        self.method = _bound(task)

    def gib(self, *, examples: int, epochs: int) -> float:
        form = self.method.form
        one = torch.ones(1, dtype=torch.bool)
        union = {f"union/{name}": one.expand(size) for name, size in form.sizes.items()}
        message = {name: torch.zeros(1).expand(leaf.size) for name, leaf in form.moving.items()}
        return self.method.paper_bytes(union, message) * epochs * examples / 4 / 128 / 2**30


def test_the_dense_volumes_of_table_2() -> None:
    task = Task(lambda: resnet18((3, 32, 32), 1000))
    assert num_parameters(task.fresh()) == 11_689_512
    resnet = _Volume(task)
    assert resnet.gib(examples=50_000, epochs=35) == pytest.approx(297.7, abs=0.05)  # CIFAR-10
    assert resnet.gib(examples=39_209, epochs=30) == pytest.approx(200.1, abs=0.05)  # GTSRB
    del resnet, task
    vgg = _Volume(Task(lambda: nn.Linear(18_811_688, 1, bias=False)))
    assert vgg.gib(examples=73_257, epochs=35) == pytest.approx(701.9, abs=0.05)  # SVHN


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threshold": 8.0}, "threshold is of log α"),
        ({"threshold": -9.0}, "got -9.0"),
        ({"kl_start": 3.0, "kl_full": 2.0}, "got 3.0 and 2.0"),
        ({"kl_start": -1.0}, "0 ≤ kl_start ≤ kl_full"),
        ({"kl_scale": -1.0}, "kl_scale must be finite"),
        ({"kl_size": "global"}, "vardrop: kl_size: should be 'local' or 'federation', got 'global'."),
        ({"sigma_lr": 0.0}, "sigma_lr must be"),
        ({"first_log_sigma2": 1.0}, "first_log_sigma2 must lie in"),
        ({"vote": 1.0}, "vote is a share of devices"),
        ({"decay_rounds": 0}, "decay_rounds must be at least 1"),
        ({"check_every": 0}, "check_every must be at least 1"),
        ({"weighting": "examples"}, "weighting is 'uniform'"),
        ({"solver": Solver(momentum=0.9, local_steps=1)}, "momentum and clip_norm"),
        ({"solver": Solver(weight_decay=0.1, local_steps=1)}, "weight_decay must be 0"),
        ({"solver": Solver(local_steps=2), "vote": 0.5}, "are for vardrop with local_steps = 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vardrop(**settings)
    assert said in str(caught.value)


def test_a_cohort_of_some_is_refused() -> None:
    schedule = Schedule(rounds=1, cohort=2)
    with pytest.raises(ConfigError, match=r"set run\.cohort to 3"):
        Simulation(vardrop(), _task(), small_federation(clients=3), Link(FLOAT32, FLOAT32), schedule, seed=0)


def test_layers_without_a_form_are_named_when_a_run_is_set_up() -> None:
    with pytest.warns(RuntimeWarning, match=r"no variational form for '0' \(it is a Embedding\)"):
        vardrop().bind(Task(lambda: nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))))
