"""How sure removal effects are, for `Attribution` and `Top`: standard errors, intervals, and what they are from.

Effects on this very run are compared with the noise of the run, expected ones with their spread over runs.
"""

from collections.abc import Sequence

from torch import Tensor

from imprint.attribution.labels import Labels
from imprint.attribution.noise import describe_noise, stands_out, widen
from imprint.attribution.replicates import Replicates, combine_errors, describe_replicates, find_quantiles
from imprint.display import for_terminal
from imprint.errors import ReadoutError
from imprint.plan import Question

ERROR = "error"
"""What the standard errors of a result are over, or why there are none, in its `details`."""
LACKING: dict[Question, str] = {
    "this_run": "unknown: the run was not repeated with a changed start",
    "expected": "unknown: one checkpoint of one run says nothing about what another seed would change",
}
"""Why nothing is known of the errors of a result, by the question that it answers."""
_LEVEL = 0.95  # of the interval that tells what is distinguishable from 0
_ADVICE = (
    "Effects on this run have errors where a recorded run is repeated, simulate(..., run=); expected ones where the "
    "store has checkpoints of several runs, simulate(..., checkpoints=[[...], [...]])."
)


def find_errors(
    labels: Labels, counts: Tensor, noise: Tensor | None, replicates: Sequence[Replicates]
) -> Tensor | None:
    """Return the standard errors of removal effects; None where nothing is known of them.

    counts: how many removals each effect is the sum of, in a shape that broadcasts to that of the effects.
    noise: of each query, shape (queries,).
    """
    if noise is not None:
        return widen(noise[:, None], counts)
    return combine_errors(replicates) / labels.n if replicates else None


def find_distinguishable(
    effects: Tensor, errors: Tensor | None, noise: Tensor | None, replicates: Sequence[Replicates]
) -> Tensor | None:
    """Tell which effects are distinguishable from 0; None where nothing is known of their errors."""
    if errors is None:
        return None
    if noise is not None:
        return stands_out(effects, errors)
    return effects.double().abs() > find_quantiles(replicates, _LEVEL) * errors


def require_level(level: float) -> float:
    """Return the level of an interval; refuse what is none."""
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise ReadoutError(f"the level of an interval lies between 0 and 1, such as 0.95, got {level!r}.")
    return float(level)


def has_errors(noise: Tensor | None, replicates: Sequence[Replicates]) -> bool:
    """Return whether anything is known of the standard errors of effects."""
    return noise is not None or len(replicates) > 0


def require_errors(labels: Labels, errors: Tensor | None) -> Tensor:
    """Return the standard errors; refuse where there are none, and say why."""
    if errors is None:
        raise ReadoutError(
            f"nothing is known of the errors of these effects ({labels.details.get(ERROR, 'no runs to compare')}). "
            f"{_ADVICE}"
        )
    return errors


def explain_errors(noise: Tensor | None, replicates: Sequence[Replicates], lacking: str) -> str:
    """Say what the standard errors of a result are from, or why they are `lacking`."""
    if noise is not None:
        return describe_noise(len(noise))
    return describe_replicates(replicates) if replicates else f"standard errors {lacking}"


def describe_error(labels: Labels, known: bool) -> list[str]:
    """Return the line about standard errors, if the result has one; of this run, with what they say nothing about.

    known: whether the result has standard errors.
    """
    if ERROR not in labels.details:
        return []
    is_of_run = known and labels.question == "this_run"
    return [for_terminal(labels.details[ERROR]) + "; they say nothing about another seed" * is_of_run]
