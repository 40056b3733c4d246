"""Judges how far replays end from the recorded end: relative to removals, and to what a perturbed start does.

Rounding is far smaller than a thousandth, by which the start of the noise rows differs. So a replay that misses the
recorded end by more than these rows do is no repetition with other rounding: something of the training is not in the
recording, and every effect would contain it. Such a replay is refused. What rounding explains is stated.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from imprint.errors import SimulationError
from imprint.simulation.engines.replay.agreement import Agreement, tolerance
from imprint.simulation.engines.replay.training import Repetition
from imprint.simulation.engines.replay.unperturbed import Unperturbed

MATERIAL = 0.01  # of a removal's effect: by so much a replay may miss the recorded end without a word
_EXPLAINED = 3.0  # times what a perturbed start does: more is no rounding, not even where it has grown to its limit
_HALF = 20.0  # the same where training computed in half precision, whose rounding is as large as that perturbation
_ROUNDED = 2e-5  # relative difference of losses: more is not the rounding of one and the same sum in float32
PRECISION, _PARTING, _CAUSES = "precision", "parting", "causes"  # remarks of the engine on a replay
_ARRIVED = 1e-3  # of the distance the run travelled: an end that is missed by less is reached


@dataclass(frozen=True)
class Deviation:
    """How far replays end from the recorded end: root mean square differences of F on some training examples.

    plain: of the unperturbed replay; `stacked` of the unperturbed row of a stack, 0 where there is none.
    noise: of runs from perturbed starts.
    effect: of removals.
    """

    plain: float
    stacked: float
    noise: float
    effect: float

    @property
    def largest(self) -> float:
        return max(self.plain, self.stacked)


def half_precision(repetition: Repetition) -> str | None:
    """Return the name of the half precision that training computed in, by autocast or by itself; None if in none."""
    names = set(repetition.trained)
    dtypes = {str(p.dtype) for name, p in repetition.task.model.named_parameters() if name in names}
    half = sorted(dtypes & {"torch.bfloat16", "torch.float16"})
    return repetition.run.circumstances.autocast or (half[0].removeprefix("torch.") if half else None)


def refuse_unexplained(found: Deviation, unperturbed: Unperturbed, repetition: Repetition) -> None:
    """Refuse an unperturbed replay that misses the recorded end by more than rounding may."""
    agreement, allowed = unperturbed.agreement, _EXPLAINED * found.noise
    if half_precision(repetition):
        allowed = max(allowed, min(_HALF * found.noise, found.effect))
    parts = agreement.worst > tolerance(repetition) or unperturbed.missed > _ARRIVED
    if found.plain <= max(MATERIAL * found.effect, allowed) or not parts or found.effect == 0:
        return
    raise SimulationError(
        f"the replay is not the recorded run: predictions at its end differ by {found.plain / found.effect:.2g} times "
        f"what removing a source does. That is no rounding: a start that differs by a thousandth changes them by only "
        f"{found.noise / found.effect:.2g} times as much as a removal. {agreement.describe_parting()} Look for "
        f"{_list_causes(agreement)}"
    )


def _list_causes(agreement: Agreement) -> str:
    if agreement.parting is None:
        otherwise = (
            "a loss that training computed in another way than the task does, such as a cross-entropy along another "
            "dimension, which rounds differently where the vocabulary is large (train with task.loss), or for "
        )
        return (
            f"{otherwise * (agreement.worst > _ROUNDED)}weights that were averaged, restored or changed after the last "
            "recorded step."
        )
    return (
        "what changed during training and is not in the recording: a weight of the loss that was annealed, a teacher "
        "or averaged weights that the loss uses, gradients that hooks or callbacks changed, or data that changed."
    )


def explain(agreement: Agreement) -> dict[str, str]:
    """Explain where and why a replay leaves the recording, as remarks on it."""
    return {_PARTING: agreement.describe_parting(), _CAUSES: _list_causes(agreement)}


def describe_missed(relative: float, chaos: float | None, remarks: Mapping[str, str]) -> str:
    """Say that the unperturbed replay misses the recorded end, by a share of a removal's effect, and what helps."""
    return (
        f"the replay misses the recorded end: predictions differ by {relative:.2g} times what removing a source does, "
        f"which every effect contains. {remarks[_PARTING]} Rounding grows where a run is chaotic (a start "
        f"that differs by a thousandth moves predictions by {chaos or 0.0:.2g} times a removal's effect), and some GPU "
        "kernels do not repeat: torch.use_deterministic_algorithms(True) in training and replay helps. Otherwise look "
        f"for {remarks[_CAUSES]}"
    )


def describe_stacked(relative: float, chaos: float | None, remarks: Mapping[str, str]) -> str:
    """Say that stacked runs miss the recorded end, by a share of a removal's effect, though single ones do not."""
    computed = f", which computed in {remarks[PRECISION]}" if remarks[PRECISION] else ""
    return (
        f"stacked runs round differently from the recorded one{computed}: "
        f"predictions at the recorded end differ by {relative:.2g} times what removing a source does, which every "
        'effect contains. Plan(engine="replay", stacked=False) replays one source after another, as training computed.'
    )
