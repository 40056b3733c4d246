"""Simulates one part of the sources, for several processes or machines to share a simulation."""

import logging
import os
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import torch

from imprint.data import Collate, HashData
from imprint.errors import PlanError
from imprint.plan import Checkpoints, Plan
from imprint.runtime.progress import Advance
from imprint.simulation.inputs import Inputs
from imprint.simulation.recorded import Recorded
from imprint.simulation.runner import simulate_into
from imprint.simulation.taking_over import check_choices
from imprint.sources import Sources
from imprint.store.part_descriptions import share_description
from imprint.store.part_writing import PartWriter, SharedRequest
from imprint.store.parts import Part, PartsFolder, Share
from imprint.store.reading import Store
from imprint.store.request import Request
from imprint.store.shared_plan import agree_on_plan
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
    is decided by the first of them that gets so far, and kept in `out` for the others. Where the plan draws dropout, so
    is `batch_size`, on which the draws depend: another one is refused, and so is another kind of device. The same call
    again resumes an interrupted part, and returns a finished one.
    """
    share, folder = Share.parse(part), PartsFolder(out)
    if refused := {"validate", "record"} & options.keys():
        raise PlanError(
            f"a part does not have all sources, so it takes no {min(refused)}=: validate the merged store with "
            "imprint.validate."
        )

    def open_part(request: Request, inputs: Inputs) -> PartWriter:
        return PartWriter(out, share, request, inputs.seen, check_choices, len(sources), inputs.draws)

    if options.get("batch_size") is None and options.get("repeat") is None:
        options["batch_size"] = _find_batch_size(folder)
    agree = partial(agree_on_plan, folder, share, task, sources)
    made = simulate_into(open_part, task, data, sources, plan, agree=agree, **options)[0]
    if made.count == 0:
        logger.warning("part %s has no sources: the other parts have all %d", share, len(sources))
    share_description(folder, sources)
    return made


def _find_batch_size(folder: PartsFolder) -> int | None:
    """Return how many examples the other parts evaluate at once, where what they draw depends on it."""
    shared = SharedRequest.find(folder)
    return None if shared is None or shared.draws is None else shared.draws.batch_size
