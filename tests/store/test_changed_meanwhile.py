"""Stores that another process changes while they are opened, or afterwards; and changes of stores of early versions."""

import shutil
from pathlib import Path

import pytest
import torch

from imprint import Plan, Sources, Store, StoreError, attribute, drop, simulate, update
from imprint.store import opening
from tests.store.test_schema import PLAN, STORES, data, queries, task

MEMBERS = {"ann": [0, 1, 2], "bob": [2, 3], "Eve & co": [4, 11]}


def make(out: Path) -> Store:
    plan = Plan(steps=2, lr=0.1)
    return simulate(task(), data(), Sources.groups(MEMBERS), plan, out=out, progress=False)


def test_a_store_that_changes_while_it_is_opened_is_opened_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is from before, the descriptions of its sources from after."""
    make(tmp_path / "store")
    sources = Sources.groups({**MEMBERS, "new": [5]}).describe({"new": {"owner": "Nell"}})
    read, changed = Store._read_sources, list[bool]()

    def change_then(self: Store) -> None:
        read(self)
        if not changed:
            changed.append(True)
            update(str(tmp_path / "store"), task(), data(), sources, progress=False)

    monkeypatch.setattr(Store, "_read_sources", change_then)
    opened = Store(tmp_path / "store")
    assert opened.source_ids == sources.ids
    assert opened.about[-1].owner == "Nell"


def test_a_store_that_was_changed_twice_since_it_was_opened_says_so(tmp_path: Path) -> None:
    opened = make(tmp_path / "store")
    drop(str(tmp_path / "store"), "bob", progress=False)
    attribute(task(), opened, queries(), progress=False)
    drop(str(tmp_path / "store"), "ann", progress=False)
    with pytest.raises(StoreError, match=r"was changed since it was opened.*open the store again"):
        Store.verify(opened)


def test_a_file_that_goes_away_while_it_is_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks of safetensors, of which the second is torch's."""
    opened = make(tmp_path / "store")

    def gone(*given: object, **named: object) -> object:
        raise RuntimeError("unable to open file <imprints> in read-only mode: No such file or directory (2)")

    monkeypatch.setattr(opening, "safe_open", gone)
    with pytest.raises(StoreError, match=r"imprints-00000.*cannot be read: .*unable to open file"):
        opened.imprints(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("schema", [7, 10])
def test_stores_of_earlier_versions_change_once_their_members_are_known(schema: int, tmp_path: Path) -> None:
    store = Path(shutil.copytree(STORES / f"schema-{schema}", tmp_path / "store"))
    states = [{name: 0.5 * tensor for name, tensor in task().state().items()}, task().state()]
    with pytest.raises(StoreError, match="with all of its sources first"):
        drop(store, "bob", progress=False)
    given = (task(), data())
    updated = update(store, *given, Sources.groups({**MEMBERS, "new": [5, 6]}), checkpoints=states, progress=False)
    left = drop(updated, "bob", progress=False)
    fresh = Sources.groups({"ann": [0, 1, 2], "Eve & co": [4, 11], "new": [5, 6]})
    expected = simulate(*given, fresh, PLAN, checkpoints=states, out=tmp_path / "fresh", progress=False)
    for name, tensor in expected.imprints(1, 0, 3, torch.device("cpu")).items():
        found = left.imprints(1, 0, 3, torch.device("cpu"))[name]
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()))
