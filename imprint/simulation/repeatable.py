"""Decides for `Plan.auto` whether a recorded run is repeated once per source.

It is where that is affordable and tells something: the recorded training took t seconds, B sources take about B·t (less
where many are repeated at once), and B·t may be a night. A few sources are then repeated, and the start of the run
is perturbed: where that moves predictions almost as much as a removal does, the run is chaotic, and only what training
like it does on average means something.
"""

from typing import Any

from imprint.display import count_of
from imprint.recording.records import Run
from imprint.runtime.progress import format_duration
from imprint.simulation import engines
from imprint.simulation.figures import check_rows, summarise
from imprint.simulation.inputs import Inputs
from imprint.simulation.path import Hooks
from imprint.sources import Sources
from imprint.store.checkpoint import CHAOTIC
from imprint.task import Task

NIGHT = 8 * 3600.0  # seconds that repeating a run may take
_FEW = 4  # sources that are removed to see how large their effects are


def find_reason_against(task: Task, data: Any, sources: Sources, run: Run, **options: Any) -> str | None:
    """Return why a run should not be repeated for so many sources; None where it should.

    options: of `Inputs.checked`.
    """
    seconds = run.seconds * len(sources)
    if seconds > NIGHT:
        once, many = format_duration(seconds / len(sources)), count_of(len(sources), "source")
        return f"which took {once}: for {many} that would be about {format_duration(seconds)}"
    inputs = Inputs.checked(task, data, sources.spread(min(_FEW, len(sources))), None, None, run=run, **options)
    with task.evaluating():
        chaos = _measure_chaos(inputs)
    if chaos is not None and chaos > CHAOTIC:
        return f"which is chaotic: a start perturbed by 1/1000 moves predictions {chaos:.2g} times as far as a removal"
    return None


def _measure_chaos(inputs: Inputs) -> float | None:
    """Repeat the run for all sources of the inputs, and return how chaotic the engine finds it."""
    engine = engines.at_checkpoint(inputs, inputs.first, inputs.state(inputs.first))
    engine.settle()
    engine.prepare()
    rows, sources = engine.choices.rows_at_once, inputs.sources
    chunks = [
        engine.simulate(engine.descent.with_sources(sources.rows(first, first + rows)), Hooks(first=first == 0))
        for first in range(0, len(sources), rows)
    ]
    figures = [check_rows(engine, sources, engines.join(chunks))]
    return summarise(type(engine), engine.gather(figures, lambda message: None)).chaos
