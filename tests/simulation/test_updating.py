"""A store that is brought up to date is the store that a simulation of the same sources makes."""

import copy
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from imprint import Plan, PlanError, Sources, SourcesError, Store, StoreError, Task, attribute, drop, simulate, update
from imprint.errors import ImprintError, ReliabilityWarning
from imprint.keys import make_keys
from imprint.simulation.descent import Descent
from imprint.simulation.engines import Chunk
from imprint.simulation.engines.tangent import Tangent
from imprint.simulation.path import Hooks
from imprint.store.signing import sign_store
from imprint.store.supplement import UPDATE
from tests.simulation.engines.trainings import Training, classification, mlp
from tests.simulation.killing import PLANS, Killed, N, contents, data, die_until_done, dies_after, run, task

CPU = torch.device("cpu")
TANGENT = PLANS["tangent"]
EVERY = Sources.by_label([i % 8 for i in range(N)])
STATES = [{name: scale * t for name, t in task().state().items()} for scale in (1.0, 0.5, 0.7)]


def every_plan(*few: str) -> pytest.MarkDecorator:
    """All plans, of which a few are quick."""
    wide = {name: [] if name in few else [pytest.mark.wide] for name in PLANS}
    return pytest.mark.parametrize("plan", [pytest.param(PLANS[n], id=n, marks=marks) for n, marks in wide.items()])


def everyone(plan: Plan) -> Sources:
    return Sources.per_example(N).rows(0, 8) if plan.engine == "spectral" else EVERY


def make(out: Path, *places: int, plan: Plan = TANGENT, **changes: Any) -> Store:
    sources = {"sources": everyone(plan).select(places)} if places else {}
    return run(out, plan, **{**sources, "checkpoints": STATES[:2], **changes})


def bring(store: Store | Path, *places: int, like: Plan = TANGENT, **changes: Any) -> Store:
    """Update a store, whose plan is like this one, to these sources."""
    given: dict[str, Any] = {"task": task(), "data": data(), "checkpoints": STATES[:2], "progress": False}
    given |= {"sources": everyone(like).select(places)} if places else {}
    return update(store, **{**given, **changes})


def assert_same(store: Store, fresh: Store, relative: float = 1e-4) -> None:
    """Assert that two stores have the same rows, within rounding, and say the same about them."""
    store.verify()
    assert (store.source_ids, store.source_names, store.table) == (fresh.source_ids, fresh.source_names, fresh.table)
    assert store.manifest.request.members == fresh.manifest.request.members
    assert store.warnings == fresh.warnings
    for index in range(len(fresh.checkpoints)):
        read = ["imprints"] + ["midpoints"] * bool(fresh.checkpoints[index].midpoints)
        for kind in read:
            found, expected = (getattr(each, kind)(index, 0, len(each), CPU) for each in (store, fresh))
            for name, tensor in expected.items():
                close = relative * float(tensor.abs().max())
                torch.testing.assert_close(found[name], tensor, rtol=relative, atol=close)
        was, now = fresh.checkpoints[index].measured, store.checkpoints[index].measured
        for name in ("norms", "linearity"):
            assert (getattr(was, name) is None) == (getattr(now, name) is None)
        assert now.lost == pytest.approx(was.lost, abs=1e-3) and now.drift == pytest.approx(was.drift, rel=1e-4)


@every_plan("two-sided", "spectral")
def test_an_updated_store_is_that_of_a_fresh_simulation(plan: Plan, tmp_path: Path) -> None:
    """Sources come and go at once, in another order, with midpoints, factors and projections; then a checkpoint."""
    store = make(tmp_path / "store", 1, 2, 3, 5, plan=plan)
    updated = bring(store, 0, 2, 5, 6, 7, 1, like=plan, drop=True)
    # (ε is that of the store: a fresh simulation chooses it from other sources)
    again = {"repeat": updated} if plan.epsilon == "auto" else {}
    fresh = make(tmp_path / "fresh", 0, 2, 5, 6, 7, 1, plan=plan, **again)
    assert_same(updated, fresh)
    assert updated.manifest.request.sources == fresh.manifest.request.sources
    (change,) = updated.manifest.history
    assert change.before == (store.sha256,) and change.kind == "updated"
    assert (change.added_ids, change.dropped_ids) == (("0", "6", "7"), ("3",))
    more = bring(updated, 0, 2, 5, 6, 7, 1, like=plan, checkpoints=STATES)
    assert [each.checkpoints for each in more.manifest.history] == [0, 1]
    again = {"repeat": more} if plan.epsilon == "auto" else {}
    assert_same(more, make(tmp_path / "longer", 0, 2, 5, 6, 7, 1, plan=plan, checkpoints=STATES, **again))


@every_plan("tangent", "spectral")
def test_dropped_sources_leave_the_rest_as_a_fresh_simulation_has_it(plan: Plan, tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1, 2, 3, 4, 5, plan=plan)
    kept = store.imprints(0, 2, 4, CPU)
    left = drop(store, ["1", "4"], progress=False)
    for name, tensor in left.imprints(0, 1, 3, CPU).items():
        assert torch.equal(tensor, kept[name])
    again = {"repeat": left} if plan.epsilon == "auto" else {}
    assert_same(left, make(tmp_path / "fresh", 0, 2, 3, 5, plan=plan, **again))


def test_float64_agrees_to_ten_digits(tmp_path: Path) -> None:
    double = task()
    double.model.double()
    x, y = data()
    given: Any = {"task": double, "data": (x.double(), y), "checkpoints": None}
    store = bring(make(tmp_path / "store", 0, 1, 2, **given), 1, 3, 2, drop=True, **given)
    assert_same(store, make(tmp_path / "fresh", 1, 3, 2, **given), 1e-10)


TRAININGS = Sources.groups({"ann": [*range(7)], "bob": [7, 11, 30], "cid": [39], "dan": [3, 30, 31], "eve": [20, 21]})


@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_a_replay_gains_and_loses_sources_and_keeps_its_noise(stacked: bool, tmp_path: Path) -> None:
    """A union is replayed, not added; overlapping sources are; the noise rows stay with the first source."""
    training = Training(mlp(), classification(), torch.optim.Adam, {"lr": 0.02}, steps=6)
    _, recorded = training.run()
    trained = replace(training, model=copy.deepcopy(training.model))
    trained.model.load_state_dict(recorded.state(6))
    plan = Plan(engine="replay", stacked=stacked)

    def fresh(sources: Sources, out: str) -> Store:
        return simulate(trained.task(), training.data, sources, plan, run=recorded, out=tmp_path / out, progress=False)

    store = fresh(TRAININGS.select([0, 1, 2]), "store")
    now = TRAININGS.group({"eve": ["eve"], "bob": ["bob"], "ann + cid": ["ann", "cid"], "cid": ["cid"]})
    with pytest.raises(PlanError, match=rf"recorded run {recorded.sha256[:12]}: give its recording as run="):
        update(store, trained.task(), training.data, now, drop=True, progress=False)
    updated = update(store, trained.task(), training.data, now, run=recorded, drop=True, progress=False)
    expected = fresh(now, "fresh")
    assert_same(updated, expected)
    assert updated.manifest.shared == expected.manifest.shared == 1
    assert updated.checkpoints[0].measured.chaos == pytest.approx(expected.checkpoints[0].measured.chaos, rel=1e-3)
    left = drop(updated, ["eve", "bob"], erase=True, progress=False)
    assert_same(left, fresh(now.select([2, 3]), "left"))
    assert left.manifest.shared is None, "how many examples overlap, only members tell"
    assert left.checkpoints[0].measured.chaos is not None and left.noise(0, CPU) is not None
    query = tuple(column[:2] for column in training.data)
    attribute(trained.task(), left, query, progress=False)


# --- what changes, and what does not


def test_sources_that_stay_are_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, simulated, plain = make(tmp_path / "store", 0, 1, 2, 3), set[str](), Tangent.simulate

    def simulate_noted(engine: Tangent, descent: Descent, hooks: Hooks) -> Chunk:
        simulated.update(descent.sources.ids)
        return plain(engine, descent, hooks)

    monkeypatch.setattr(Tangent, "simulate", simulate_noted)
    bring(store, 0, 1, 2, 3, 7)
    assert simulated == {"7"}


def test_nothing_to_do_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1)
    before = contents(store.path)
    assert bring(store, 0, 1).sha256 == store.sha256
    assert contents(store.path) == before


def test_a_split_source_needs_consent_and_goes_where_its_pieces_come(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1)
    members = EVERY.members[1]
    pieces = Sources.groups({"0": EVERY.members[0], "1a": members[:1], "1b": members[1:]})
    with pytest.raises(SourcesError, match=r"the sources given lack 1, which the store has.* drop=True \(--drop\)"):
        bring(store, sources=pieces)
    split = bring(store, sources=pieces, drop=True)
    assert split.source_ids == ("0", "1a", "1b")
    assert_same(split, make(tmp_path / "fresh", sources=pieces))
    changed = Sources.groups({"0": EVERY.members[0], "1a": members[:1], "1b": members[2:]})
    with pytest.raises(SourcesError, match="1b had other members"):
        bring(split, sources=changed)
    again = bring(split, sources=changed, drop=True)
    assert again.manifest.history[-1].added_ids == again.manifest.history[-1].dropped_ids == ("1b",)


def test_more_data_is_another_base(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1)
    x, y = data()
    more = Sources.groups({"0": EVERY.members[0], "1": EVERY.members[1], "new": [N]})
    with pytest.raises(StoreError, match=r"made from 24 training examples, now 25\. More or other data is another"):
        bring(store, sources=more, data=(torch.cat([x, x[:1]]), torch.cat([y, y[:1]])))
    with pytest.raises(StoreError, match=r"made from other training data\. .* with which every imprint changes"):
        bring(store, 0, 1, 2, data=(x + 1, y))
    with pytest.raises(StoreError, match="cannot be updated: the weights of checkpoint 1 changed"):
        bring(store, 0, 1, 2, checkpoints=[STATES[0], STATES[2]])
    with pytest.raises(StoreError, match="cannot be updated: the plan's steps was"):
        bring(store, 0, 1, 2, plan=Plan(steps=2, lr=0.2))
    assert Store(store.path).sha256 == store.sha256 and not (store.path / UPDATE).exists()


OTHER_TASK = task()
with torch.no_grad():
    OTHER_TASK.model.get_parameter(OTHER_TASK.names[0]).mul_(2.0)
X, Y = data()


def double_loss(z: torch.Tensor, batch: Any) -> torch.Tensor:
    return 2 * F.cross_entropy(z, batch[1], reduction="none")


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"task": OTHER_TASK, "checkpoints": None}, "the weights of checkpoint 0 changed"),
    "data": ({"data": (X + 1, Y)}, "made from other training data"),
    "fewer examples": ({"data": (X[:-1], Y[:-1])}, "made for 24 training examples, the data has 23"),
    "loss": (
        {"task": Task(task().model, outputs=task().outputs, output_loss=double_loss)},
        "the loss function changed",
    ),
    "checkpoint": ({"checkpoints": STATES[2:]}, "the weights of checkpoint 0 changed"),
    "plan": ({"plan": Plan(steps=2, lr=0.2)}, "the plan's steps was"),
}


@pytest.mark.parametrize("other", OTHER)
def test_what_the_store_was_not_made_from_is_refused_where_nothing_is_simulated(other: str, tmp_path: Path) -> None:
    """With the same sources, and where sources are only dropped."""
    store = make(tmp_path / "store", 0, 1, checkpoints=None)
    before, (changes, message) = contents(store.path), OTHER[other]
    for places in ([0, 1], [0]):
        with pytest.raises(ImprintError, match=message):
            bring(store, *places, drop=True, **{"checkpoints": None, **changes})
    assert contents(store.path) == before


def test_checkpoints_in_another_order_are_others(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1)
    with pytest.raises(StoreError, match="the weights of checkpoint 0 changed"):
        bring(store, 0, 1, checkpoints=STATES[1::-1])


def test_other_data_is_noticed_by_its_losses_where_it_was_not_hashed(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1, hash_data="none")
    for places in ([0, 1], [0, 1, 2]):
        with pytest.raises(StoreError, match=r"loss on probe example .* made from other training data, or"):
            bring(store, *places, data=(X + 1, Y))
    with pytest.warns(
        ReliabilityWarning, match=r"it was not hashed, and losses of .* of its 24 examples were compared"
    ):
        assert bring(store, 0, 1, 2).source_ids == ("0", "1", "2")


def test_what_cannot_be_changed_is_refused_with_the_reason(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1)
    with pytest.raises(PlanError, match="has 2 checkpoints, and 1 are given"):
        bring(store, 0, 1, checkpoints=STATES[:1])
    with pytest.raises(SourcesError, match="cannot change at once"):
        bring(store, 0, 1, 2, checkpoints=STATES)
    with pytest.raises(SourcesError, match="these are all 2 sources"):
        drop(store, ["0", "1"])
    with pytest.raises(SourcesError, match="there is no source 'x'"):
        drop(store, "x")
    with pytest.raises(SourcesError, match="no sources to drop"):
        drop(store, [])
    factored = make(tmp_path / "factored", 0, 1, plan=PLANS["spectral"])
    both = Sources.groups({"0": [0], "1": [1], "two": [2, 3]})
    with pytest.raises(SourcesError, match="as factors, and source 'two' has several examples"):
        bring(factored, sources=both)


def test_a_store_of_an_earlier_version_is_changed_once_all_its_sources_are_known(tmp_path: Path) -> None:
    from tests.store.test_schema import PLAN, STORES
    from tests.store.test_schema import data as old_data
    from tests.store.test_schema import task as old_task

    path = Path(shutil.copytree(STORES / "schema-8", tmp_path / "store"))
    assert PLAN.keep_pair
    with pytest.raises(StoreError, match=r"did not record which .* call imprint\.update"):
        drop(path, "ann")
    states = [{name: 0.5 * tensor for name, tensor in old_task().state().items()}, old_task().state()]
    known = {"ann": [0, 1, 2], "bob": [2, 3], "Eve & co": [4, 11]}
    given: Any = {"checkpoints": states, "progress": False}
    with pytest.raises(SourcesError, match="give all of its sources, unchanged"):
        update(path, old_task(), old_data(), Sources.groups({"ann": [0, 1, 2]}), drop=True, **given)
    updated = update(path, old_task(), old_data(), Sources.groups({**known, "new": [5]}), **given)
    assert updated.manifest.history[0].added_ids == ("new",)
    assert drop(updated, "ann", progress=False).source_ids == ("bob", "Eve & co", "new")


# --- what else a store has


def test_descriptions_go_with_their_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path / "store", 0, 1, 2)
    store.describe({"0": {"owner": "Ann"}, "1": {"owner": "Bob"}})
    left = drop(store, "0", progress=False)
    assert [each.owner for each in left.about] == ["Bob", ""]
    assert left.description.changes[-1].before["0"].owner == "Ann"
    more = EVERY.select([1, 2, 5]).describe({"1": {"owner": "Someone else"}, "5": {"owner": "Eve"}})
    assert [each.owner for each in bring(left, sources=more).about] == ["Bob", "", "Eve"]
    assert "owner of source '1' stays 'Bob', not 'Someone else'. `imprint describe`" in caplog.text
    caplog.clear()
    bring(left, sources=more)
    assert "stays 'Bob', not 'Someone else'" in caplog.text, "where there is nothing to do, too"


def test_a_signature_is_needed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path / "store", 0, 1, 2)
    private, public = make_keys(tmp_path / "key")
    sign_store(store, private)
    left = drop(store, "1", progress=False)
    assert "was signed before it was changed: sign it again" in caplog.text
    with pytest.raises(StoreError, match="was changed after it was signed"):
        Store(store.path, signed_by=public)
    sign_store(left, private)
    assert len(Store(store.path, signed_by=public)) == 2


def test_whoever_has_the_store_open_reads_on(tmp_path: Path) -> None:
    store, queries = make(tmp_path / "store", 0, 1, 2), (data()[0][:2], data()[1][:2])
    before = attribute(task(), store, queries, progress=False).scores
    opened = Store(store.path)
    left = drop(store, "1", progress=False)
    assert torch.equal(attribute(task(), opened, queries, progress=False).scores, before)
    now = attribute(task(), left, queries, progress=False).scores
    torch.testing.assert_close(now, before[:, [0, 2]], rtol=1e-4, atol=1e-5)
    files = set(store.path.rglob("*.safetensors"))
    bring(left, 0, 2, 4)  # which removes what only the first version had
    assert files - set(store.path.rglob("*.safetensors"))


def test_erased_imprints_are_gone_at_once(tmp_path: Path) -> None:
    left = drop(make(tmp_path / "store", 0, 1, 2), "1", erase=True, progress=False)
    used = {file.path for file in left.manifest.files()}
    assert {str(p.relative_to(left.path)) for p in left.path.rglob("*") if p.is_file()} == {*used, "manifest.json"}


def test_a_temporary_store_lives_as_long_as_its_next_version(tmp_path: Path) -> None:
    left = drop(drop(run(None, TANGENT), "1", progress=False), "1", progress=False)  # type: ignore[arg-type]
    left.verify()
    assert left.origin["sources"].ids == left.source_ids


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imprint.store.history.MOST", 2)
    store = make(tmp_path / "store", 0, 1, 2, 3, 4)
    for gone in ("0", "1", "2"):
        store = drop(store, gone, progress=False)
    assert [each.dropped_ids for each in store.manifest.history] == [("1",), ("2",)]
    assert store.manifest.forgotten == 1
    store.verify()


# --- interruptions


@pytest.mark.usefixtures("snapshots_at_every_step")
@pytest.mark.parametrize("name", ["tangent", pytest.param("spectral in full", marks=pytest.mark.wide)])
def test_an_update_that_dies_again_and_again_is_the_same(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    make(tmp_path / "store", 1, 2, 3, plan=plan)
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    die_until_done(lambda die: bring(tmp_path / "store", 0, 2, 5, like=plan, drop=True, progress=die), 40)
    bring(tmp_path / "other", 0, 2, 5, like=plan, drop=True)
    found, expected = Store(tmp_path / "store"), Store(tmp_path / "other")
    assert_same(found, expected)
    assert not (tmp_path / "store" / UPDATE).exists()


def test_until_an_update_is_complete_the_store_is_what_it_was(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1)
    with pytest.raises(Killed):
        bring(store, 0, 1, 2, 3, progress=dies_after(9))
    assert Store(store.path).sha256 == store.sha256
    Store(store.path).verify()
    assert (store.path / UPDATE).is_dir()
    with pytest.raises(
        StoreError, match=r"something else: the sources .* Finish that .*, or delete \S+/store/update\."
    ):
        bring(store, 0, 1, 4)
    left = drop(store, "1", progress=False)
    assert bring(left, 0, 2, 3).source_ids == ("0", "2", "3")
    assert not (store.path / UPDATE).exists()


def test_only_one_process_changes_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from imprint.store.folder import locked

    store = make(tmp_path / "store", 0, 1)
    caplog.set_level(logging.ERROR)
    with locked(store.path), pytest.raises(StoreError, match="is writing to"):
        drop(store, "1")
