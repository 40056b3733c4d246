"""Simulates one part of the sources, for several processes or machines to share a simulation."""

import logging
import os
from collections.abc import MutableMapping
from typing import Any, Literal, TypedDict, Unpack, cast

import torch

from imprint.data import Collate, HashData
from imprint.errors import PlanError
from imprint.plan import Checkpoints, Plan
from imprint.runtime.progress import Advance
from imprint.simulation.inputs import Inputs
from imprint.simulation.recorded import Recorded, open_run, settle_states
from imprint.simulation.runner import simulate_into
from imprint.simulation.taking_over import check_choices
from imprint.sources import Sources
from imprint.store.part_writing import PartWriter, SharedRequest
from imprint.store.parts import Part, PartsFolder, Share
from imprint.store.reading import Store
from imprint.store.request import Request
from imprint.task import Task

logger = logging.getLogger(__name__)


class PartOptions(TypedDict, total=False):
    """The options of `simulate` that go with parts."""

    checkpoints: Checkpoints | None
    run: Recorded | None
    batch_size: int | None
    collate_fn: Collate | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    memory: int | str | None
    repeat: Store | str | os.PathLike[str] | None
    hash_data: HashData
    note: Any
    progress: bool | Advance


@torch.inference_mode(False)
def simulate_part(
    part: str,
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None = None,
    *,
    out: str | os.PathLike[str],
    **options: Unpack[PartOptions],
) -> Part:
    """Simulate one of several parts of the sources; `imprint.merge(out)` joins all of them into the store.

    part: such as "3/8", the third of eight. Each may be made by another process, on another machine, at any time, and
        gets a folder of its own in `out`.
    out: the folder that the store will be in; the same for all parts.
    options: as of `imprint.simulate`, and the same for all parts.

    What all parts must agree on, such as learning rates, the basis of the curvature and how many sources are in a file,
    is decided by the first of them that gets so far, and kept in `out` for the others. The same call again resumes an
    interrupted part, and returns a finished one.
    """
    share, folder = Share.parse(part), PartsFolder(out)
    if refused := {"validate", "record"} & options.keys():
        raise PlanError(f"a part has not all sources, so {min(refused)}= is for the merged store: imprint.validate.")
    plan = take_shared_plan(folder, plan, cast(dict[str, Any], options), task)

    def open_part(request: Request, inputs: Inputs) -> PartWriter:
        if not share.of_chunks(len(sources)):
            logger.warning("part %s has no sources: there are only %d", share, len(sources))
        return PartWriter(out, share, request, inputs.seen, check_choices, len(sources))

    return simulate_into(open_part, task, data, sources, plan, **options)[0]


def take_shared_plan(
    folder: PartsFolder, plan: Plan | Literal["auto"] | None, options: MutableMapping[str, Any], task: Task
) -> Plan | Literal["auto"] | None:
    """Return the plan that the first part has chosen, in place of "auto"; change run and checkpoints accordingly."""
    shared = SharedRequest.find(folder) if plan == "auto" else None
    if shared is None:
        return plan
    chosen, recorded = shared.request.plan, open_run(options.get("run"))
    options["run"], options["checkpoints"] = settle_states(chosen, recorded, options.get("checkpoints"), task)
    return chosen
