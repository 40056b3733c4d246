"""Stores of earlier versions: each schema left a store here, which every later version must read as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from imprint import Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.store.manifest import FINGERPRINTS, SCHEMA
from tests.store.test_faults import a_copy, mutations

STORES = Path(__file__).parent / "stores"
EARLIER = range(1, SCHEMA)
PLAN = Plan(engine="trajectories", steps=(2, 3), lr=0.1, keep_pair=True, weight=(1.0, 2.0))
SCORES = [
    [-0.2462940476834774, 0.43775438517332077, -0.060998125933110714],
    [-0.25686047598719597, 0.3544592335820198, -0.011335251620039344],
]
every_earlier_schema = pytest.mark.parametrize("schema", EARLIER)


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 3, generator=generator), torch.randint(0, 2, (12,), generator=generator)


def queries() -> tuple[Tensor, Tensor]:
    x, y = data()
    return x[:2], y[:2]


def again(out: Path, plan: Plan = PLAN) -> Store:
    """The simulation that the stores of all schemas were made with."""
    sources = Sources.groups({"ann": [0, 1, 2], "bob": [2, 3], "Eve & co": [4, 11]})
    states = [{name: 0.5 * tensor for name, tensor in task().state().items()}, task().state()]
    return simulate(task(), data(), sources, plan, checkpoints=states, out=out, progress=False)


@pytest.fixture
def store(schema: int, tmp_path: Path) -> Path:
    """A copy of the store that the version of a schema has left."""
    return Path(shutil.copytree(STORES / f"schema-{schema}", tmp_path / "store"))


def test_every_earlier_schema_has_left_a_store() -> None:
    missing = [schema for schema in EARLIER if not (STORES / f"schema-{schema}" / "manifest.json").is_file()]
    assert not missing, (
        f"SCHEMA is {SCHEMA}, but there is no store of schema {missing} in tests/stores: check out the last version "
        "that wrote it, make `again(out)` of this file there, and add the folder as tests/stores/schema-K."
    )


@every_earlier_schema
def test_it_is_of_that_schema(schema: int, store: Path) -> None:
    assert json.loads((store / "manifest.json").read_text())["schema"] == schema


@every_earlier_schema
def test_it_is_verified(store: Path) -> None:
    Store(store).verify()


@every_earlier_schema
def test_its_scores_are_what_they_were(store: Path) -> None:
    scores = attribute(task(), store, queries(), progress=False).scores
    torch.testing.assert_close(scores, torch.tensor(SCORES, dtype=torch.float64), rtol=0, atol=1e-5)


@every_earlier_schema
def test_its_pair_is_read_out(store: Path) -> None:
    scores = attribute(task(), store, queries(), readout="literal", progress=False).scores
    torch.testing.assert_close(scores, torch.tensor(SCORES, dtype=torch.float64), rtol=0.05, atol=0.01)


@every_earlier_schema
def test_it_says_everything_that_a_store_of_today_says(store: Path, tmp_path: Path) -> None:
    theirs, ours = Store(store), again(tmp_path / "today")
    assert theirs.manifest.fingerprints.keys() == set(FINGERPRINTS)
    losses, data = (ours.manifest.request[name] for name in ("losses", "data"))
    assert theirs.manifest.request["losses"] == pytest.approx(losses[:8], abs=1e-4)
    assert theirs.manifest.request["data"] == {"all": None, "sampled": data["sampled"]}
    for name in ("n", "dtype", "plan", "parameters", "states", "sources"):
        assert theirs.manifest.request[name] == ours.manifest.request[name], name
    assert theirs.source_ids == ours.source_ids
    assert theirs.source_sizes == ours.source_sizes


@every_earlier_schema
def test_the_same_simulation_finds_it_finished(store: Path) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert len(again(store)) == 3
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


@every_earlier_schema
def test_another_plan_is_refused_on_it(store: Path) -> None:
    with pytest.raises(StoreError, match=r"already holds a store, made otherwise: the plan's lr was 0\.1, is 0\.2"):
        again(store, Plan(engine="trajectories", steps=(2, 3), lr=0.2, keep_pair=True, weight=(1.0, 2.0)))


@pytest.mark.parametrize("schema", [1])
def test_schema_1_must_say_twice_the_same(store: Path) -> None:
    """It had no checksum, but it had everything that was asked for in two places."""
    values = json.loads((store / "manifest.json").read_text())
    values["n"] = 13
    (store / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read: n and fingerprints\.n differ"):
        Store(store)


@every_earlier_schema
@pytest.mark.parametrize("prints", [None, [], {}, {"n": 12}], ids=["null", "list", "empty", "few"])
def test_what_is_no_manifest_of_its_schema_is_refused(prints: Any, store: Path) -> None:
    values = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({**values, "fingerprints": prints}))
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Store(store)


@settings(max_examples=100)
@given(draw=st.data())
@pytest.mark.parametrize("schema", [1])
def test_anything_in_a_manifest_without_a_checksum_gives_finite_scores_or_an_error(
    schema: int, draw: st.DataObject
) -> None:
    folder = STORES / f"schema-{schema}"
    values = draw.draw(mutations(json.loads((folder / "manifest.json").read_text())))
    with a_copy(folder, manifest=json.dumps(values).encode()) as copy:
        try:
            scores = attribute(task(), copy, queries(), progress=False).scores
        except StoreError:
            return
        assert bool(scores.isfinite().all())


def test_a_store_of_today_is_not_taken_for_one_without_a_checksum(tmp_path: Path) -> None:
    store = again(tmp_path / "store")
    values = json.loads((store.path / "manifest.json").read_text())
    (store.path / "manifest.json").write_text(json.dumps({**values, "schema": 1, "n": 13}))
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read: fingerprints\.n is missing"):
        Store(store.path)
