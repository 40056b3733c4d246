"""Chooses damping and weight of every checkpoint from curvature and gradients there, never from ground truth.

**Damping.** λ = tr(H)/N: the curvature that one average example brings. A direction with less curvature than that hangs
on single examples; take one away and the frozen H is wrong there, so the response must not trust it. λ is kept inside a
trust region: what a random half of the data is predicted to do to the outputs must be neither nothing nor more than a
linear prediction can hold, from a quarter to one nat of the margins (in other tasks, of the noise of the outputs).
Where data is plentiful a half does move little: λ stays above a tenth of tr(H)/N, and above what rounding hides.

**Horizon of a path.** N/(2c), with c the size of the curvature that one example brings, its Frobenius norm. For an
example with one output, c is its trace, and a path of N/(2c) filters as a damping of 2 tr(H)/N does. An example with
many outputs, such as a window of tokens, pulls in many directions, and hangs less on each. The factor of 2 was chosen
on the development settings (docs/what-was-tried.md). A horizon is never longer than
the trust region allows, nor than a quarter of the training, where that was recorded (`training_time`): a training that
was stopped early did not overfit, and a path that goes on would. With batch norm it has half of that: training moves
the running statistics along with the weights, and a path in evaluation mode keeps those of the checkpoint.

**Step of a path.** A path has μ × horizon steps of 1/μ, μ the largest curvature: where it starts for the number of
steps, and on the whole of it for their size. From an early checkpoint curvature rises tenfold and more, most of all
where the running statistics of batch norm have not settled, and a step that suits the start would multiply responses
at each later one. So the path is walked first; where curvature rises, it gets shorter and not longer.

**Metric.** Groups of examples get a path in the metric of the training: where Adam's second moments came with every
checkpoint, all of the above is measured in it (`metric`), so that a factor in the moments cancels.

**Curvature.** That of Gauss–Newton where the task shows its outputs, else the Hessian (`look`). Responses grow along
negative curvature, by e^(horizon × curvature): paths are kept so short that this is at most e³, and infinitely many
steps get a damping of twice that curvature.

**Weight.** A checkpoint far from where training comes to rest, in units of what sampling the data does to it, says
little of the models that retraining ends with: 1/(1 + snr), snr = N ḡᵀ(H+λ)⁻¹ḡ / mean_i g_iᵀ(H+λ)⁻¹g_i. A path goes on
from the checkpoint, so that only the very first ones count less there: 1/(1 + (snr/10)²). A silent one disagrees with
the others: times the square of its mean agreement with them on what halves would do. Divided by the size of its
predictions, so that each has one vote.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import torch

from imprint.compat import has_batch_norm
from imprint.data import Collate, HashData
from imprint.errors import SimulationError
from imprint.model.dropout import dropouts
from imprint.plan import Checkpoints, Plan, engine_for, register_chooser
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.engines import AutoFindings, AutoPath, registered
from imprint.simulation.frozen import attempt_products
from imprint.simulation.inputs import Inputs
from imprint.simulation.look import DIRECTIONS, Look, curvature_of, look, measure_own_curvature
from imprint.simulation.metric import in_metric
from imprint.simulation.preflight import find_why_not_vmap, refuse_loss
from imprint.simulation.recorded import Recorded, list_checkpoints, open_run, refuse_both
from imprint.simulation.repeatable import find_reason_against
from imprint.simulation.states import States
from imprint.simulation.step_size import TRIES, measure_curvature, measure_gauss_newton, walk
from imprint.simulation.training_time import find_training_time
from imprint.sources import Sources, require_sources
from imprint.task import Task

logger = logging.getLogger(__name__)

_STEPS = 1000  # of a path, at most: beyond, H is not what it was
_WALKED = 1024  # examples of a step of the path that is walked beforehand
_SHARPER = 1.8  # times the curvature a step was chosen for: below 2, where responses begin to grow
_BATCH_NORM = 2  # times shorter is a path along which the statistics of batch norm stay as they are
_FAR = 10.0  # distance from rest, squared, beyond which a path from a checkpoint counts less
_GROWTH = 3.0  # horizon times negative curvature, at most: the logarithm of how much responses grow along it


def weigh(looks: Sequence[Look], horizons: Sequence[float] | None = None) -> list[float]:
    """Return how much each checkpoint counts in the mean; the largest weight is 1.

    horizons: of paths from the checkpoints; None for responses at the checkpoints themselves.
    """
    effects = [one.effects(one.damping) for one in looks]
    unit = [(e - e.mean(0)) / (e - e.mean(0)).norm(dim=0).clamp(min=1e-300) for e in effects]
    agreement = torch.tensor([[float((a * b).sum(0).mean()) for b in unit] for a in unit])
    found = []
    for index, one in enumerate(looks):
        with_others = float(agreement[index].sum() - agreement[index, index])
        others = with_others / (len(looks) - 1) if len(looks) > 1 else 1.0
        signal = one.signal(one.damping)
        vote = 1 / max(one.size(1 / horizons[index] if horizons else one.damping), 1e-300)
        far = (signal / _FAR) ** 2 if horizons else signal
        found.append(vote * max(others, 0.0) ** 2 / (1 + far))
    top = max(found)
    return [value / top for value in found] if top > 0 else [1.0] * len(looks)


def choose_path(descent: Descent, found: Look, time: float | None = None) -> tuple[int, float]:
    """Choose steps and step size of a path: as many as reach its horizon, each 1/μ of the sharpest curvature along it.

    time: how far the training went, where that is known.
    """
    descent = replace(descent, plan=Plan(batch_size=_WALKED))  # all of the data where it is no more than that
    seen = measure_curvature if curvature_of(descent.task.task) == "hessian" else measure_gauss_newton
    sharpest, lowest = found.sharpest, found.lowest
    shorter = _BATCH_NORM if has_batch_norm(descent.task.task.model) else 1
    bound = shorter * max(found.reach(measure_own_curvature(descent), time), -lowest / _GROWTH)
    steps = min(max(1, round(sharpest / bound)), _STEPS)
    for _ in range(TRIES):
        size = float(f"{1 / max(sharpest, bound):.4g}")
        along = walk(replace(descent, lr=size, steps=steps), seen)
        if along is not None and along.largest <= _SHARPER * sharpest:
            break
        sharpest = 8 * sharpest if along is None else along.largest
    return steps, size


def find_metric(task: Task, checkpoints: Checkpoints | None) -> Literal["adam"] | None:
    """Return the metric of the training: Adam's, where its second moments came with every checkpoint."""
    states = States(task, checkpoints)
    return "adam" if all(states.moments(index) is not None for index in range(len(states))) else None


@torch.inference_mode(False)
def choose_plan(
    task: Task,
    data: Any,
    sources: Sources,
    checkpoints: Checkpoints | None,
    run: Recorded | None,
    batch_size: int | None,
    collate_fn: Collate | None,
    hash_data: HashData,
    progress: bool | Advance,
) -> Plan:
    """Choose a plan: the work of `Plan.auto`."""
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "device": None, "dtype": None}
    options["hash_data"] = hash_data
    if (recorded := open_run(run)) is not None:
        refuse_both(checkpoints)
        reason = find_reason_against(task, data, sources, recorded, **options)
        if reason is None:
            return Plan(engine=engine_for("this_run"))
        logger.warning(
            "the recorded run is not repeated, %s; scores will describe training like it, on average", reason
        )
        checkpoints = list_checkpoints(recorded, task)
    return choose_for_checkpoints(task, data, sources, checkpoints, options, progress)


def choose_for_checkpoints(
    task: Task,
    data: Any,
    sources: Sources,
    checkpoints: Checkpoints | None,
    options: dict[str, Any],
    progress: bool | Advance,
) -> Plan:
    """Choose a plan that simulates from checkpoints.

    options: of `Inputs.checked`.
    """
    require_sources(sources)
    grouped = max(sources.sizes) > 1
    kind, metric = curvature_of(task), find_metric(task, checkpoints) if grouped else None
    time = find_training_time(checkpoints, metric)
    given = Plan(curvature=kind, preconditioner=metric)
    inputs = Inputs.checked(task, data, sources, given, checkpoints, **options)
    bar = Progress("choosing", DIRECTIONS * len(inputs.states), "curvature products", progress)
    looks, descents = list[Look](), list[Descent]()
    with task.evaluating(), closing(bar):
        for index in range(len(inputs.states)):
            descent = in_metric(inputs.descent(index, inputs.state(index)))
            refuse_loss(descent, FullBatch(descent.data, descent.dtype))
            descents.append(replace(descent, vectorise=find_why_not_vmap(descent, attempt_products) is None))
            looks.append(look(descents[-1], bar.advance))
            if not looks[-1].sharpest > 0:
                raise SimulationError(
                    f"checkpoint {index} has no curvature to choose a plan from: its outputs do not change "
                    "with the parameters, or fit the data to within rounding. Leave it out, or give a plan."
                )
            bar.skip((index + 1) * DIRECTIONS - bar.done)  # the space may end before

    def choose_paths() -> list[AutoPath]:
        with task.evaluating():
            paths = [choose_path(*each, time) for each in zip(descents, looks, strict=True)]
        weights = weigh(looks, [steps * size for steps, size in paths])
        return [AutoPath(*path, _rounded(weight)) for path, weight in zip(paths, weights, strict=True)]

    found = AutoFindings(
        grouped=grouped,
        curvature=kind,
        preconditioner=metric,
        dampings=tuple(_rounded(one.safe_damping) for one in looks),
        weights=tuple(map(_rounded, weigh(looks))),
        dropout=bool(dropouts(task.model)),
        paths=choose_paths,
    )
    plan = next(plan for engine in reversed(registered()) if (plan := engine.propose(found)) is not None)
    for index in range(len(looks)):
        logger.info("checkpoint %d: %s", index, plan.at(index, len(looks)))
    return plan


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


register_chooser(choose_plan)
