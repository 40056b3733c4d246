"""Looks for signs that a simulation will mislead, and says what to do about them.

Each guard is a pure function of measured figures: it returns a warning, or None where nothing is wrong. The caller
hands it to `Notices`, so that it is shown once, kept in the store and repeated with every result.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from imprint.errors import ReliabilityWarning
from imprint.simulation.curvature import Spectrum, longer
from imprint.store.checkpoint import Spread

if TYPE_CHECKING:
    from imprint.simulation.preconditioner import Compared

_LARGER = 30.0  # times the others' imprints, in the weights of the mean
_SHOWN = 4  # names in a message


def check_unfelt_moments(index: int, found: "Compared", batch_norm: bool) -> ReliabilityWarning | None:
    """Say which parameters training has felt no gradient on, though evaluation mode gives them one.

    Values here and there, whose gradients were small by chance in the few steps so far, are not worth a warning.
    """
    unfelt = {name: count for name, count in found.unfelt.items() if 2 * count > found.moments[name].numel()}
    if not unfelt:
        return None
    names = list(unfelt)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    cause = (
        "Biases before batch norm are such values, and leaving them where they are is right; bias=False there leaves "
        "nothing to warn of."
        if batch_norm
        else "Were the moments kept with another model or loss? Give the checkpoint alone to have them estimated."
    )
    return ReliabilityWarning(
        f"checkpoint {index}: {sum(unfelt.values()):,} values of {shown} are left where they are: the recorded "
        f"second moments say that training gave them no gradient, and evaluation mode gives them one. {cause}"
    )


def check_moments_scale(index: int, found: "Compared") -> ReliabilityWarning | None:
    """Say that second moments were recorded on another scale than that of the task's loss, and what was made of it."""
    if found.fits:
        return None
    return ReliabilityWarning(
        f"checkpoint {index}: the recorded second moments do not fit the task's loss: gradients were {found.ratio:.2g} "
        "times as large in training as they are here. The moments are rescaled by that factor, so that steps have the "
        "length they had in training. Does the task sum where training took a mean, or the other way round? Give the "
        "task the loss of the training, or the checkpoint without its moments to have them estimated."
    )


def check_step(
    index: int, lr: float, damping: float, momentum: float, curvature: Spectrum
) -> ReliabilityWarning | None:
    """Say that a step is too long for the curvature that was measured.

    damping: what it adds to that curvature.
    """
    safe = longer(momentum) / max(curvature.largest + damping, 1e-300)
    if not lr > 2 * safe:
        return None
    stability = curvature.growth(lr, damping, momentum)
    return ReliabilityWarning(
        f"checkpoint {index}: a step multiplies some direction by {stability:.3g} at lr={lr:.3g}, above 1 "
        f"(curvature up to {curvature.largest:.3g}): the descent may diverge; lr={safe:.2g} would be safe."
    )


def check_weights(weights: Sequence[float], norms: Sequence[Spread | None]) -> ReliabilityWarning | None:
    """Say that one checkpoint's imprints are so much larger than the others' that it alone decides the mean."""
    sizes = {
        index: weight * norm.median
        for index, (weight, norm) in enumerate(zip(weights, norms, strict=True))
        if weight > 0 and norm is not None
    }
    if len(sizes) < 2:
        return None
    largest = max(sizes, key=sizes.__getitem__)
    others = median(size for index, size in sizes.items() if index != largest)
    if not others > 0 or sizes[largest] <= _LARGER * others:
        return None
    return ReliabilityWarning(
        f"checkpoint {largest}: its imprints are {sizes[largest] / others:.3g} times as large as those of the other "
        "checkpoints, so that it alone decides the mean. A step that is too long, or a state far from where training "
        f"ended, does this: leave checkpoint {largest} out, give it fewer steps or a smaller weight, or compare the "
        "attribution of each checkpoint alone."
    )
