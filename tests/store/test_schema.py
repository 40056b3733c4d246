"""Every schema from version 0.1 on has left a store here, which every later version must read as it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.store import manifest
from imprint.store.manifest import SCHEMA
from imprint.store.values import sealed

STORES = Path(__file__).parent / "stores"
FIRST = 7  # the schema of version 0.1
PLAN = Plan(engine="trajectories", steps=(2, 3), lr=0.1, keep_pair=True, weight=(1.0, 2.0))
SCORES = {
    "jvp": [[-0.2462940476834774, 0.43775438517332077, -0.060998125933110714],
            [-0.25686047598719597, 0.3544592335820198, -0.011335251620039344]],
    "literal": [[-0.24642717838287354, 0.4375048875808716, -0.06099355220794678],
                [-0.2569918632507324, 0.3543121814727783, -0.011320948600769043]],
}  # fmt: skip
every_schema = pytest.mark.parametrize("schema", range(FIRST, SCHEMA + 1))


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 3, generator=generator), torch.randint(0, 2, (12,), generator=generator)


def queries() -> tuple[Tensor, Tensor]:
    x, y = data()
    return x[:2], y[:2]


def simulate_again(out: Path, plan: Plan = PLAN) -> Store:
    """Run the simulation that made the stores of all schemas."""
    sources = Sources.groups({"ann": [0, 1, 2], "bob": [2, 3], "Eve & co": [4, 11]})
    states = [{name: 0.5 * tensor for name, tensor in task().state().items()}, task().state()]
    return simulate(task(), data(), sources, plan, checkpoints=states, out=out, progress=False)


@pytest.fixture
def store(schema: int, tmp_path: Path) -> Path:
    """A copy of the store that the version of a schema has left."""
    return Path(shutil.copytree(STORES / f"schema-{schema}", tmp_path / "store"))


def test_every_schema_has_left_a_store() -> None:
    missing = [schema for schema in range(FIRST, SCHEMA + 1) if not (STORES / f"schema-{schema}").is_dir()]
    assert not missing, (
        f"SCHEMA is {SCHEMA}, but there is no store of schema {missing} in {STORES}: check out the last version that "
        "wrote it, call `simulate_again(out)` of this file there, and add the folder as schema-K."
    )


@every_schema
def test_it_is_of_that_schema_and_whole(schema: int, store: Path) -> None:
    assert json.loads((store / "manifest.json").read_text())["schema"] == schema
    Store(store).verify()


@every_schema
@pytest.mark.parametrize("readout", SCORES)
def test_its_scores_are_what_they_were(readout: Any, store: Path) -> None:
    scores = attribute(task(), store, queries(), readout=readout, progress=False).scores
    expected = torch.tensor(SCORES[readout], dtype=scores.dtype)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)  # float32, on any processor


@every_schema
def test_it_says_everything_that_a_store_of_today_says(store: Path, tmp_path: Path) -> None:
    theirs, ours = Store(store), simulate_again(tmp_path / "today")
    before, now = theirs.manifest.request, ours.manifest.request
    assert before.probes.values.losses == pytest.approx(now.probes.values.losses, abs=1e-4)
    assert before.members in (now.members, None)  # which earlier versions did not know
    same: dict[str, Any] = {"probes": now.probes, "modules": now.modules, "members": now.members}
    assert replace(before, **same) == now  # but for what is compared otherwise
    assert (theirs.source_ids, theirs.source_sizes) == (ours.source_ids, ours.source_sizes)
    for one, other in zip(theirs.checkpoints, ours.checkpoints, strict=True):
        assert one.decided == other.decided
        assert one.measured.linearity is not None and one.measured.norms is not None


@every_schema
def test_it_says_whether_sources_overlap_where_its_version_knew(schema: int, store: Path) -> None:
    assert Store(store).manifest.shared == (None if schema < 10 else 1)


@every_schema
def test_the_same_simulation_finds_it_finished(store: Path) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert len(simulate_again(store)) == 3
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


@every_schema
def test_another_plan_is_refused_on_it(store: Path) -> None:
    with pytest.raises(StoreError, match=r"already holds a store, made otherwise: the plan's lr was 0\.1, is 0\.2"):
        simulate_again(store, Plan(engine="trajectories", steps=(2, 3), lr=0.2, keep_pair=True, weight=(1.0, 2.0)))


@every_schema
@pytest.mark.parametrize("request_", [None, [], {}, {"n": 12}], ids=["null", "list", "empty", "few"])
def test_what_is_no_manifest_of_its_schema_is_refused(request_: Any, store: Path) -> None:
    values = json.loads((store / "manifest.json").read_text())
    del values["sha256"]
    (store / "manifest.json").write_text(json.dumps(sealed({**values, "request": request_})))
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read: request"):
        Store(store)


@pytest.mark.parametrize("schema", [FIRST])
@pytest.mark.parametrize("earlier", range(1, FIRST))
def test_a_store_from_before_the_first_release_is_refused(earlier: int, store: Path) -> None:
    (store / "manifest.json").write_text(json.dumps({"schema": earlier}))
    with pytest.raises(StoreError, match=r"manifest\.json was made before version 0\.1, .*: make it again\."):
        Store(store)


@pytest.mark.parametrize("schema", [FIRST])
def test_a_store_of_a_later_version_is_refused(store: Path) -> None:
    (store / "manifest.json").write_text(json.dumps({"schema": SCHEMA + 1}))
    with pytest.raises(StoreError, match=rf"schema {SCHEMA + 1}, this version reads up to {SCHEMA}: upgrade imprint"):
        Store(store)


@pytest.mark.parametrize("schema", [FIRST])
def test_a_later_schema_reads_it_through_a_function_that_adds_its_fields(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a schema that calls the note by another name."""
    monkeypatch.setattr(manifest, "SCHEMA", SCHEMA + 1)
    with monkeypatch.context() as patch:
        patch.setitem(manifest._UPGRADES, SCHEMA, lambda value: {**value.content, "note": "upgraded"})
        assert Store(store).manifest.note == "upgraded"
