"""Agrees on a plan that is chosen automatically by several parts: the first to share its choice decides.

It is shared before anything is simulated, so that no part has begun with another plan when it learns of it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from imprint.errors import StoreError
from imprint.plan import Plan
from imprint.sources import Sources
from imprint.store.folder import write_sealed
from imprint.store.manifest import JOURNAL, MANIFEST, SCHEMA
from imprint.store.part_writing import SharedRequest, require_this_version
from imprint.store.parts import PLAN, PartsFolder, Share
from imprint.store.reading import Store
from imprint.store.records import Checksum, read
from imprint.store.request import read_plan
from imprint.task import Task

_FILE = f"{PLAN}.json"


@dataclass(frozen=True)
class _SharedPlan:
    """A plan that was chosen automatically.

    of: a checksum of what it was chosen for, see `_identify`.
    """

    schema: int
    of: Checksum
    plan: Annotated[Plan, read_plan]


def agree_on_plan(folder: PartsFolder, share: Share, task: Task, sources: Sources, choose: Callable[[], Plan]) -> Plan:
    """Return the plan that was chosen for all parts; if there is none yet, choose it and share it.

    choose: chooses a plan, which may take long: another part may have shared its own by then.
    """
    if (known := find_plan(folder, task, sources)) is not None:
        return known
    folder.refuse_other_use("the store", JOURNAL)
    folder.refuse_other_number(share)
    of = _identify(task, sources)
    values = {"schema": SCHEMA, "of": of, "plan": choose().to_json()}
    folder.publish(PLAN, lambda place: write_sealed(place / _FILE, values))
    found = _find(folder, of)
    assert found is not None
    return found


def find_plan(folder: PartsFolder, task: Task, sources: Sources) -> Plan | None:
    """Return the plan of the store that is in the folder, or of its parts; None where there is none yet."""
    if (folder.out / MANIFEST).is_file():
        return Store(folder.out).manifest.plan
    if (found := _find(folder, _identify(task, sources))) is not None:
        return found
    shared = SharedRequest.find(folder)  # by a part whose plan was given
    return None if shared is None else shared.request.plan


def _find(folder: PartsFolder, of: str) -> Plan | None:
    """Read the plan that was shared; refuse one that was chosen for something else."""
    with folder.mending(PLAN):
        value = folder.read(PLAN, _FILE)
        if value is None:
            return None
        found = read(_SharedPlan, require_this_version(value))
    if found.of != of:
        raise StoreError(
            f"{value.file} has a plan that was chosen for another model or other sources. Give another folder, or "
            f"delete {folder.path}."
        )
    return found.plan


def _identify(task: Task, sources: Sources) -> str:
    """Return a checksum of the sources and of the shapes of the model."""
    shapes = [(name, list(p.shape)) for name, p in task.model.named_parameters()]
    return hashlib.sha256(json.dumps([sources.ids, sources.sizes, shapes]).encode()).hexdigest()
