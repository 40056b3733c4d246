"""Compares the ways to find out what each source does (retrain, replay, simulate) and names the cheapest.

Each way answers one of two questions. Retraining from several seeds measures what to expect; a replay measures what
this run would have been, and replays of several runs what to expect; a simulation estimates what to expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from imprint.advice.costs import Costs
from imprint.display import count_of
from imprint.plan import Question, format_plan
from imprint.runtime.progress import format_duration
from imprint.simulation.estimate import Estimate

SEEDS = 3
"""How many training runs an expectation is averaged over: with fewer, its error is hardly known."""
_GOALS: dict[Question, str] = {
    "this_run": "what this very run would have been without each source",
    "expected": "what to expect of training without each source",
}


@dataclass(frozen=True)
class Way:
    """One way to find out what each source does, and what it takes.

    task: what to do, as in "it is cheapest to …".
    question: the one that it answers.
    measures: whether it measures what a source does, or estimates it.
    how: what that means in detail.
    seconds, peak_bytes, disk_bytes: None where they are not known.
    unknown: why the time is not known, and what to do about it; empty where it is known.
    """

    name: Literal["retrain", "repeat", "simulate"]
    task: str
    question: Question
    measures: bool
    how: str
    seconds: float | None = None
    peak_bytes: int | None = None
    disk_bytes: int | None = None
    unknown: str = ""


def list_ways(costs: Costs) -> tuple[Way, ...]:
    """List the ways with what each takes, most direct first."""
    return (_retrain(costs), *_replay(costs), _simulate(costs))


def _retrain(costs: Costs) -> Way:
    models, training = costs.sources + 1, costs.training
    how = f"{models:,} trainings from each of {SEEDS} seeds: on everything, and without each source"
    way = Way("retrain", f"retrain from {SEEDS} seeds", "expected", True, how)
    if isinstance(training, str):
        return replace(way, unknown=training)
    how += f"; each {training.origin}, " + (f"{training.at_once} at once" if training.at_once > 1 else "one by one")
    seconds = SEEDS * training.seconds_for(models)
    return replace(way, how=how, seconds=seconds, peak_bytes=training.peak_bytes, disk_bytes=0)


def _replay(costs: Costs) -> tuple[Way, Way]:
    """Return the replay of one run, and that of several, each of which is recorded first."""
    replay, training = costs.replay, costs.training
    one = Way("repeat", "replay this run", "this_run", True, "record the run, and repeat it once per source")
    how = f"record {SEEDS} runs, and repeat each once per source"
    several = Way("repeat", f"replay {SEEDS} recorded runs", "expected", True, how)
    if isinstance(replay, Estimate):
        at_once = "one by one" if replay.one_by_one else f"{replay.rows_at_once:,} at once"
        how = f"repeat the recorded run once per source, {at_once}"
        one, several = (replace(w, peak_bytes=replay.peak_bytes, disk_bytes=replay.disk_bytes) for w in (one, several))
        one = replace(one, how=how, seconds=replay.seconds)
        if isinstance(training, str):
            return one, replace(several, unknown=training)
        return one, replace(several, seconds=SEEDS * (training.seconds + replay.seconds))
    if isinstance(replay, str) or isinstance(training, str):
        reason = replay if isinstance(replay, str) else str(training)
        return replace(one, unknown=reason), replace(several, unknown=reason)
    seconds = training.seconds + training.seconds_for(costs.trainings)
    less = "" if training.at_once > 1 else "; less where many run at once"
    one, several = (replace(way, how=way.how + less) for way in (one, several))
    return replace(one, seconds=seconds), replace(several, seconds=SEEDS * seconds)


def _simulate(costs: Costs) -> Way:
    found, how = costs.simulation, f"{format_plan(costs.plan)}; from {count_of(costs.checkpoints, 'checkpoint')}"
    way = Way("simulate", "simulate", "expected", False, how)
    if isinstance(found, str):
        return replace(way, unknown=found)
    return replace(way, seconds=found.seconds, peak_bytes=found.peak_bytes, disk_bytes=found.disk_bytes)


def advise(ways: Sequence[Way], question: Question) -> str:
    """Name the cheapest way that answers a question, and what the others would take."""
    answering = [way for way in ways if way.question == question]
    known = sorted((way for way in answering if way.seconds is not None), key=lambda way: way.seconds or 0.0)
    unknown = [way for way in answering if way.seconds is None]
    if not known:
        return f"How long it takes to know {_GOALS[question]} is not known: {_end(unknown[0].unknown)}"
    best, others = known[0], known[1:]
    text = f"To know {_GOALS[question]}, {best.task}: about {format_seconds(best.seconds)}"
    if others:
        text += ", against " + " and ".join(f"{format_seconds(way.seconds)} to {way.task}" for way in others)
    if not best.measures:
        text += "; this is an estimate, so validate it (imprint validate)"
    elif not all(way.measures for way in answering):
        text += "; this measures what a simulation only estimates"
    elif len(answering) == 1:
        text += "; nothing else answers this question"
    for reason in dict.fromkeys(way.unknown for way in unknown):
        names = " or ".join(f"to {way.task}" for way in unknown if way.unknown == reason)
        text = f"{_end(text)} How long it would take {names} is not known: {reason}"
    return _end(text)


def _end(text: str) -> str:
    """End a sentence with one full stop."""
    return f"{text.rstrip('.')}."


def format_seconds(seconds: float | None) -> str:
    """Format a time for a comparison: seconds with two digits, from two minutes on as on a clock.

    >>> format_seconds(0.0234), format_seconds(18.3), format_seconds(4000), format_seconds(None)
    ('0.023 s', '18 s', '1:06:40', 'unknown')
    """
    if seconds is None:
        return "unknown"
    return f"{float(f'{seconds:.2g}'):g} s" if seconds < 119.5 else format_duration(seconds)
