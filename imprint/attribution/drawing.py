"""Draws removal effects as bars: `Attribution.plot`."""

from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING

from torch import Tensor

from imprint.attribution.labels import Labels, describe_groups
from imprint.attribution.noise import INDISTINGUISHABLE
from imprint.attribution.top import ESTIMATE
from imprint.attribution.uncertainty import describe_error
from imprint.display import for_picture
from imprint.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HELPS, _HARMS = "#2a6f97", "#c8553d"
_FAINT = 0.3  # opacity
_LINE = 80  # characters


def draw_effects(
    labels: Labels,
    effect: Tensor,
    distinguishable: Tensor | None,
    ends: Tensor | None,
    title: str,
    k: int,
    ax: "Axes | None",
) -> "Axes":
    """Draw the k largest effects, shape (sources,); faint bars are those that are not distinguishable from 0.

    ends: of the 95% intervals, shape (2, sources), drawn as lines.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtra("plot", "report") from error
    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    order = effect.abs().argsort(descending=True)[:k].flip(0).tolist()
    names = [for_picture(labels.source_names[i]) + " ≈" * labels.is_estimate(i) for i in order]
    sign = -1 if labels.better == "higher" else 1
    colours = [_HELPS if sign * float(effect[i]) >= 0 else _HARMS for i in order]
    bars = ax.barh(range(len(names)), effect[order].tolist(), color=colours, tick_label=names)
    if ends is not None:
        lengths = (effect.double() - ends).abs()[:, order].numpy()
        ax.errorbar(effect[order].tolist(), range(len(names)), xerr=lengths, fmt="none", ecolor="0.3", elinewidth=1)
    faint = [distinguishable is not None and not bool(distinguishable[i]) for i in order]
    for bar, pale in zip(bars, faint, strict=True):
        bar.set_alpha(_FAINT if pale else None)
    ax.axvline(0, color="0.3", linewidth=0.8)
    notes = [
        *(for_picture(labels.unit), labels.meaning),
        *[f"faint: {INDISTINGUISHABLE[labels.question]}"] * any(faint),
        *["lines: 95% intervals"] * (ends is not None),
        *map(for_picture, describe_error(labels, distinguishable is not None)),
        *[f"≈ {ESTIMATE}"] * any(map(labels.is_estimate, order)),
        *describe_groups(labels),
    ]
    ax.set_xlabel("\n".join(chain.from_iterable(wrap(note, _LINE) for note in notes)))
    ax.set_title(title)
    return ax
