"""Draws the demo's figures: predicted against actual effects, ranked contributors, and single queries."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from imprint.benchmarking.demo.experiment import SEEDS, Outcome
from imprint.errors import MissingExtra
from imprint.statistics import Array
from imprint.store.files import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN, PREDICTED, ACTUAL, HARM, GUESS = "#12394f", "#2a6f97", "#e09f3e", "#c1292e", "#b8bdc4"
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.6",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "savefig.dpi": 140,
}


def draw(outcome: Outcome, folder: Path) -> dict[str, Path]:
    """Draw every figure into a folder, and return the files by name."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra("the report", "report") from error
    files = {}
    with mpl.rc_context(_STYLE):
        for name, function in (("scatter", draw_scatter), ("ranking", draw_ranking), ("queries", draw_queries)):
            figure = function(outcome)
            files[name] = folder / f"{name}.png"
            write(files[name], figure.savefig)
    return files


def draw_scatter(outcome: Outcome) -> "Figure":
    """Draw predicted against actual mean removal effects, one disc per contributor, sized by its examples."""
    from matplotlib.figure import Figure

    check, names, bad = outcome.check, outcome.sources.names, outcome.setting.mislabeller
    predicted, actual = check.predicted.mean(0), check.truth.mean(0)
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    ax = figure.subplots()
    ax.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.85", linewidth=0.8, zorder=0)
    ends = np.array([predicted.min(), predicted.max()])
    ends = ends + np.array([-0.08, 0.08]) * np.ptp(ends)
    fitted = actual.mean() + check.mean_slope.value * (ends - predicted.mean())
    ax.plot(ends, fitted, color="0.5", linewidth=1, label=f"slope {check.mean_slope}", zorder=1)
    ax.plot(ends, ends, color="0.5", linewidth=1, linestyle=":", label="prediction = outcome", zorder=1)
    colours = [HARM if i == bad else PREDICTED for i in range(len(names))]
    ax.errorbar(predicted, actual, 2 * check.standard_error, fmt="none", ecolor="0.7", elinewidth=1, zorder=2)
    ax.scatter(predicted, actual, s=[1.5 * size for size in outcome.sources.sizes], c=colours, alpha=0.85, zorder=3)
    _label(ax, predicted, actual, [f"{n} (mislabels)" if i == bad else n for i, n in enumerate(names)])
    ax.set_xlabel("predicted change of the mean loss (nats) if the contributor were removed")
    ax.set_ylabel("actual change (nats) after retraining without it")
    ax.set_title(f"Correlation {check.correlation}, ceiling {check.ceiling:.2f}")
    ax.legend(frameon=False, loc="upper left")
    return figure


def _label(ax: "Axes", x: Array, y: Array, names: list[str]) -> None:
    """Write names in a column on the right, in the order of their points, with a thin line to each point."""
    bottom, top = ax.get_ylim()
    gap, column = 0.045 * (top - bottom), float(x.max() + 0.1 * np.ptp(x))
    order = np.argsort(y)
    heights = y[order].copy()
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    heights -= max(0.0, (heights[-1] - y.max()) / 2)  # close labels spread both ways
    for i in range(len(heights) - 2, -1, -1):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    for index, height in zip(order, heights, strict=True):
        ax.plot([x[index], column], [y[index], height], color="0.8", linewidth=0.7, zorder=1)
        ax.text(column, height, f" {names[index]}", fontsize=9, va="center")
    ax.set_xlim(right=column + 0.25 * np.ptp(x))


def draw_ranking(outcome: Outcome) -> "Figure":
    """Draw contributors from most helpful to most harmful: this run, expected, retrained, and the guess by size."""
    from matplotlib.figure import Figure

    check, names = outcome.check, outcome.sources.names
    predicted, actual = check.predicted.mean(0), check.truth.mean(0)
    sizes = np.array(outcome.sources.sizes)
    guess = sizes * (np.clip(actual, 0, None).sum() / sizes.sum())
    order = np.argsort(predicted)
    rows = np.arange(len(order))
    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    ax = figure.subplots()
    own = outcome.this_run.removal_effect.double().mean(0).numpy()
    ax.barh(rows + 0.3, own[order], 0.19, color=OWN, label="this very run, replayed without it: exact")
    ax.barh(rows + 0.1, predicted[order], 0.19, color=PREDICTED, label=f"expected: mean of {SEEDS} replayed runs")
    actually = f"actual, mean of {len(check.actual)} retrainings (± 2 SE)"
    whisker = {"ecolor": "0.45", "elinewidth": 0.9}
    error = 2 * check.standard_error[order]
    ax.barh(rows - 0.1, actual[order], 0.19, color=ACTUAL, xerr=error, error_kw=whisker, label=actually)
    ax.barh(rows - 0.3, guess[order], 0.19, color=GUESS, label="guess by size alone (scaled)")
    ax.axvline(0, color="0.4", linewidth=0.8)
    ax.set_yticks(rows, [f"{names[i]}  ({sizes[i]})" for i in order])
    ticks = ax.get_yticklabels()
    ticks[int(np.flatnonzero(order == outcome.setting.mislabeller)[0])].set_color(HARM)
    ax.set_xlabel("change of the mean loss (nats) if removed:  ← harmful   helpful →")
    ax.set_title("Who helps, who harms (number of examples)")
    ax.legend(frameon=False, loc="upper left", fontsize=8.5)
    return figure


def draw_queries(outcome: Outcome, count: int = 6) -> "Figure":
    """Draw single queries: the image, and every contributor's predicted and actual effect on its loss."""
    from matplotlib.figure import Figure

    check, names = outcome.check, outcome.sources.names
    chosen = choose_queries(outcome, count)
    columns = (count + 1) // 2
    figure = Figure(figsize=(3.6 * columns, 8.6), layout="constrained")
    axes = figure.subplots(4, columns, height_ratios=(1, 2.4, 1, 2.4))
    rows = np.arange(len(names))[::-1]
    for place, query in enumerate(chosen):
        top, column = 2 * (place // columns), place % columns
        picture, bars = axes[top, column], axes[top + 1, column]
        picture.imshow(outcome.setting.queries[0][query].reshape(8, 8).numpy(), cmap="gray_r", interpolation="nearest")
        picture.set_axis_off()
        digit = int(outcome.setting.queries[1][query])
        picture.set_title(f"{'an' if digit == 8 else 'a'} {digit}", fontsize=12, loc="center")
        effect = check.predicted[query]
        bars.barh(rows, effect, 0.62, color=[PREDICTED if value >= 0 else HARM for value in effect])
        bars.plot(check.truth[query], rows, "D", color=ACTUAL, markersize=4.5, markeredgecolor="white")
        bars.axvline(0, color="0.4", linewidth=0.8)
        bars.set_yticks(rows, names if column == 0 else [""] * len(names))
        bars.tick_params(axis="both", labelsize=9)
        bars.set_xlabel(f"rank correlation {check.rank_correlations[query]:.2f}", fontsize=9)
        if column == 0:
            bars.get_yticklabels()[outcome.setting.mislabeller].set_color(HARM)
    figure.suptitle(
        "Change of one query's loss (nats) if the contributor were removed: bars predicted, diamonds actual",
        fontsize=11,
    )
    return figure


def choose_queries(outcome: Outcome, count: int) -> list[int]:
    """Choose the queries with the largest predicted effects, one per digit, even if the predictions are wrong."""
    strength = np.abs(outcome.check.predicted).max(1)
    labels = outcome.setting.queries[1].numpy()
    chosen: list[int] = []
    for query in np.argsort(-strength):
        if labels[query] not in labels[chosen]:
            chosen.append(int(query))
        if len(chosen) == count:
            break
    return sorted(chosen, key=lambda query: int(labels[query]))
