import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import laconic as lc
from laconic.core import Artifact, DataError, PayloadError, read_state, spec_of
from laconic.model_file import open_model, read_model, write_model
from laconic.models import artifact_of, initialize, models

SHAPE, OUTPUTS = (1, 12, 12), 5
ARCHITECTURE = {"name": "mlp", "shape": list(SHAPE), "outputs": OUTPUTS, "settings": {"hidden": [20, 9]}}


def net(seed: int = 0) -> nn.Module:
    module = models.build("mlp", {"hidden": [20, 9]}, given=(SHAPE, OUTPUTS))
    initialize(module, lc.Key.from_seed(seed))
    return module.eval()


def sparse_state(seed: int = 0, *, kept: float = 0.1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: leaf * (torch.rand(leaf.shape, generator=random) < kept) for name, leaf in read_state(net(seed)).items()
    }


def ensemble() -> Artifact:
    tree = {f"{k}/{name}": leaf for k in range(3) for name, leaf in read_state(net(k)).items()}
    return Artifact("members", tree, {"members": 3, "outputs": "logits"})


def masks() -> Artifact:
    random = torch.Generator().manual_seed(0)
    bits = {name: torch.rand(leaf.shape, generator=random) < 0.5 for name, leaf in ensemble().tree.items()}
    return Artifact("masks", bits, {"members": 3, "outputs": "logits", "seed": 7, "scale": "kaiming"})


ARTIFACTS = {
    "dense": Artifact("weights", read_state(net())),
    "sparse": Artifact("weights", sparse_state()),
    "zero": Artifact("weights", sparse_state(kept=0.0)),
    "members": ensemble(),
    "masks": masks(),
}


SPEC = spec_of(read_state(net()))


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_what_is_read_is_what_was_written(kind: str) -> None:
    artifact = ARTIFACTS[kind]
    found = read_model(write_model(artifact, ARCHITECTURE, SPEC))
    assert found.artifact.tree.keys() == artifact.tree.keys()
    for name, leaf in artifact.tree.items():
        assert torch.equal(found.artifact.tree[name], leaf)
    assert found.architecture == ARCHITECTURE
    assert found.parameters == sum(p.numel() for p in net().parameters())


def test_an_ensemble_of_masks_is_a_bit_for_each() -> None:
    blob = write_model(masks(), ARCHITECTURE, SPEC)
    parameters = sum(p.numel() for p in net().parameters())
    assert len(blob) < 3 * parameters / 8 + 250 < len(write_model(ensemble(), ARCHITECTURE, SPEC)) / 10
    with pytest.raises(PayloadError, match="is the most"):
        read_model(blob, max_parameters=parameters)
    net_of_masks = read_model(blob).model()
    assert net_of_masks(torch.zeros(2, *SHAPE)).shape == (2, OUTPUTS)


def test_zeros_cost_next_to_nothing() -> None:
    count = sum(leaf.numel() for leaf in sparse_state().values())
    kept = sum(int((leaf != 0).sum()) for leaf in sparse_state().values())
    p = kept / count
    entropy = -count * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8
    size = len(write_model(ARTIFACTS["sparse"], ARCHITECTURE, SPEC))
    assert size <= 4 * kept + 1.01 * entropy + 200
    assert size < len(write_model(ARTIFACTS["dense"], ARCHITECTURE, SPEC)) / 5


@pytest.mark.parametrize(("values", "error"), [("float16", 2.0**-11), ("int8", 0.5 / 127)])
def test_shorter_values_are_as_close_as_they_can_be(values: str, error: float) -> None:
    for state in (read_state(net()), sparse_state()):
        blob = write_model(Artifact("weights", state), ARCHITECTURE, SPEC, values=values)  # type: ignore[arg-type]
        assert len(blob) < len(write_model(Artifact("weights", state), ARCHITECTURE, SPEC))
        found = read_model(blob).artifact.tree
        for name, leaf in state.items():
            largest = float(leaf.abs().max())
            assert float((found[name] - leaf).abs().max()) <= error * largest * 1.001
            assert not bool(found[name][leaf == 0].any())  # what was pruned stays so


@pytest.mark.parametrize(
    "method",
    [
        lc.fedavg(),
        lc.fedensemble(members=2),
        lc.fedsparse(lambda0=1e-3),
        lc.fedsparse(lambda0=1e-3, structured=False),
        lc.feddrop(),
        lc.fedpm(),
        lc.fedpm(evaluate="sample"),
        lc.fedpm(evaluate="ensemble", samples=2),
    ],
    ids=["fedavg", "fedensemble", "fedsparse", "unstructured", "feddrop", "fedpm", "sampled", "masks"],
)
def test_a_run_leaves_a_file_that_predicts_exactly_as_its_model(method: lc.Method, tmp_path: Path) -> None:
    data = lc.data.digits(clients=10)
    run = lc.fit(method=method, data=data, rounds=4, cohort=5, workers=0, out=tmp_path, name="x")
    assert run.directory is not None
    loaded = lc.load(run.directory / "model.lac")
    with torch.no_grad():
        assert torch.equal(loaded(data.x[:300]), run.model(data.x[:300]))
    assert run.summary["model_bytes"] == (run.directory / "model.lac").stat().st_size
    assert run.summary["final_parameters"] == sum(p.numel() for p in loaded.parameters())
    assert run.summary["multiply_adds_whole"] == 64 * 64 + 64 * 10


def test_a_pruned_model_is_physically_smaller(tmp_path: Path) -> None:
    data = lc.data.digits(clients=10)
    run = lc.fit(
        method=lc.fedsparse(lambda0=1e-3), data=data, rounds=6, cohort=5, workers=0, out=tmp_path, init="glorot"
    )
    assert run.directory is not None
    assert run.summary["sparsity"] > 0.05
    loaded = lc.load(run.directory / "model.lac")
    assert sum(p.numel() for p in loaded.parameters()) < run.summary["parameters"]
    assert run.summary["multiply_adds"] < run.summary["multiply_adds_whole"]
    assert run.summary["model_bytes"] < 4 * run.summary["parameters"]


def test_a_mask_costs_its_entropy(tmp_path: Path) -> None:
    data = lc.data.digits(clients=10)
    run = lc.fit(method=lc.fedpm(), data=data, rounds=3, cohort=10, workers=0, out=tmp_path, model="lg_mlp")
    assert run.directory is not None
    found = open_model(run.directory / "model.lac")
    bits = torch.cat([leaf.reshape(-1) for leaf in found.artifact.tree.values()])
    share = float(bits.double().mean())
    entropy = -len(bits) * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8
    assert found.num_bytes <= 1.005 * entropy + 256
    assert found.bits_per_parameter < 1.02


@pytest.mark.parametrize("settings", [{"seed": -1, "scale": "e"}, {"seed": 2**64, "scale": "e"}, {"seed": 1.5}, {}])
def test_a_mask_without_its_seed_is_refused(settings: dict[str, int | str]) -> None:
    mask = {name: leaf > 0 for name, leaf in read_state(net()).items()}
    with pytest.raises(PayloadError, match="seed"):
        read_model(write_model(Artifact("mask", mask, settings), ARCHITECTURE, SPEC)).model()


def test_residual_streams_survive_the_file() -> None:
    from laconic.models import dissect, plan, sliced
    from laconic.models.assemble import UNITS

    shape, outputs = (3, 16, 16), 10
    whole = models.build("resnet20_gn", {}, given=(shape, outputs))
    initialize(whole, lc.Key.from_seed(3))
    anatomy = dissect(whole)
    units = torch.rand(sum(layer.units for layer in anatomy.layers), generator=torch.Generator().manual_seed(0)) < 0.6
    for layer in anatomy.layers:
        units[layer.first] = True
    units[anatomy.layers[-1].first :] = True
    small = sliced(whole, anatomy, plan(anatomy, units)).eval()
    artifact = Artifact("units", {UNITS: units, **read_state(small)})
    blob = write_model(
        artifact, {"name": "resnet20_gn", "shape": list(shape), "outputs": outputs}, spec_of(read_state(whole))
    )
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(read_model(blob).model()(x), small(x))


# --- files that are not what they should be --------------------------------------------------------------------------

BLOB = write_model(ARTIFACTS["sparse"], ARCHITECTURE, SPEC)


def resealed(header: object, payload: bytes | None = None) -> bytes:
    """A file with another header and a digest that fits."""
    from laconic.model_file import _DIGEST_BYTES, _FIELDS, MAGIC, VERSION, _digest

    _, _, size, _, fingerprint = _FIELDS.unpack(BLOB[: _FIELDS.size])
    old = BLOB[_FIELDS.size + _DIGEST_BYTES + size :] if payload is None else payload
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    fields = _FIELDS.pack(MAGIC, VERSION, len(text), len(old), fingerprint)
    return fields + _digest(fields, text, old) + text + old


def test_every_prefix_is_refused() -> None:
    for size in range(len(BLOB)):
        with pytest.raises(PayloadError):
            read_model(BLOB[:size])
    with pytest.raises(PayloadError, match="trailing"):
        read_model(BLOB + b"\0")


def test_every_flipped_bit_is_noticed() -> None:
    for at in range(8 * len(BLOB)):
        flipped = bytearray(BLOB)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(PayloadError):
            read_model(bytes(flipped))


HEADER = {"kind": "weights", "model": ARCHITECTURE}
BAD_HEADERS = {
    "no JSON": b"{",
    "deep": b"[" * 60_000,
    "a list": [],
    "unknown key": {**HEADER, "code": "import os"},
    "unknown kind": {**HEADER, "kind": "pickle"},
    "unknown values": {**HEADER, "values": "float8"},
    "no model": {"kind": "weights"},
    "odd settings": {**HEADER, "settings": 3},
    "unknown architecture": {**HEADER, "model": {**ARCHITECTURE, "name": "mpl"}},
    "unknown setting": {**HEADER, "model": {**ARCHITECTURE, "settings": {"hiden": [3]}}},
    "shape of words": {**HEADER, "model": {**ARCHITECTURE, "shape": ["a"]}},
    "negative": {**HEADER, "model": {**ARCHITECTURE, "outputs": -1}},
    "true": {**HEADER, "model": {**ARCHITECTURE, "outputs": True}},
    "enormous": {**HEADER, "model": {**ARCHITECTURE, "settings": {"hidden": [100_000_000, 100_000_000]}}},
    "code to import": {**HEADER, "model": {**ARCHITECTURE, "name": "os:abort"}},
    "another size": {**HEADER, "model": {**ARCHITECTURE, "settings": {"hidden": [21, 9]}}},
    "many members": {**HEADER, "kind": "members", "settings": {"members": 10**9}},
    "no members": {**HEADER, "kind": "members"},
    "many masks": {**HEADER, "kind": "masks", "settings": {"members": 10**9, "seed": 1, "scale": "e"}},
    "units": {**HEADER, "kind": "units"},
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_header_that_lies_is_refused(case: str) -> None:
    with pytest.raises(PayloadError):
        read_model(resealed(BAD_HEADERS[case]))


def test_mutants_give_a_payload_error_or_a_model() -> None:
    random = np.random.default_rng(0)
    header = json.dumps(HEADER).encode()
    payload = BLOB[BLOB.index(b"}}") + 2 :]
    for _ in range(2000):
        mutant = bytearray(payload)
        for _ in range(int(random.integers(1, 4))):
            mutant[int(random.integers(len(mutant)))] = int(random.integers(256))
        if random.random() < 0.3:
            mutant = mutant[: int(random.integers(len(mutant)))]
        try:
            found = read_model(resealed(header, bytes(mutant)))
        except PayloadError:
            continue
        assert all(bool(leaf.isfinite().all()) for leaf in found.artifact.tree.values())


def test_a_model_of_ones_own_must_be_brought(tmp_path: Path) -> None:
    def own() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    data = lc.data.digits(clients=10)
    run = lc.fit(model=own, data=data, rounds=1, cohort=3, workers=0, out=tmp_path)
    assert run.directory is not None
    file = run.directory / "model.lac"
    with pytest.raises(DataError, match="pass it"):
        lc.load(file)
    for brought in (own, own()):
        with torch.no_grad():
            assert torch.equal(lc.load(file, model=brought)(data.x[:50]), run.model(data.x[:50]))
    with pytest.raises(DataError, match="the same one"):
        lc.load(file, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 11)))


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.lac"):
        open_model(tmp_path / "nowhere.lac")
    (tmp_path / "x.lac").write_bytes(b"not a model at all, but long enough to be one")
    with pytest.raises(DataError, match=r"x\.lac cannot be loaded: .* is it a model\.lac\?"):
        lc.load(tmp_path / "x.lac")


def test_a_module_of_another_kind_has_no_compact_form() -> None:
    odd = replace(lc.fedavg().bind(lc.Task(net)), artifact=None, global_model=lambda server: nn.Linear(3, 3))
    assert artifact_of(odd, {}) is None
