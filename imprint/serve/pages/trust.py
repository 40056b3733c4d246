"""The page *Trust*: what was tested, how well predictions held, and what has changed since."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from markupsafe import Markup

from imprint.attribution.labels import MEANINGS
from imprint.display import count_of
from imprint.serve.access.guard import require_page
from imprint.serve.access.roles import Identity
from imprint.serve.pages.charts import draw_ranges, draw_ratio
from imprint.serve.pages.rendering import render
from imprint.serve.pages.wording import (
    describe_drift,
    describe_p,
    describe_standing,
    describe_tests,
    list_once,
    name_ends,
)
from imprint.serve.query_statistics import Summary
from imprint.serve.service import Service
from imprint.store.checkpoint import CHAOTIC
from imprint.validation.drift import FEWEST
from imprint.validation.record import Validation, read_validation
from imprint.validation.verdict import WITHIN, Verdict

router = APIRouter(prefix="/trust", include_in_schema=False)
_UNKNOWN = "unknown"
_CALM = 0.1  # chaos up to which removals stand out from noise


@dataclass(frozen=True)
class Figure:
    """A number on the page, with what it means."""

    name: str
    value: str
    meaning: str


@router.get("")
def show_trust(request: Request, identity: Annotated[Identity, Depends(require_page("see_trust"))]) -> Response:
    """Show whether the numbers of this service can be trusted, and why."""
    service: Service = request.app.state.service
    store, asked = service.store, service.statistics.summary
    validation = read_validation(store)
    verdict = None if validation is None else validation.verdict
    request_of = store.manifest.request
    return render(
        request,
        "trust.html.j2",
        identity,
        service=service,
        meaning=MEANINGS[store.question].partition(": ")[2].replace("this source", "a source"),
        standing=describe_standing(verdict),
        validation=validation,
        verdict=verdict,
        other_measure=None
        if validation is None or validation.measure == service.task.measure_name
        else validation.measure,
        tests="" if verdict is None else describe_tests(verdict),
        evidence=[] if verdict is None else _list_evidence(verdict),
        ratio=None if verdict is None else _draw_slope(verdict),
        noise=_list_noise(asked, verdict),
        asked=asked,
        drift=describe_drift(asked.drift, asked.different, FEWEST),
        ranges=_draw_drift(validation, asked, service.task.measure_name),
        fingerprints=[
            ("Store", store.sha256, "every file of the store: imprints, sources, plan"),
            ("Model", store.model_sha256, "the parameters of the model that is attributed"),
            ("Training run", request_of.recording, "the recorded run that was replayed"),
            (
                "Signed by",
                None if store.signed is None else store.signed.key,
                "the key that the store was checked against",
            ),
        ],
        made=store.manifest.created,
        versions=store.manifest.versions,
        warnings=list_once(store.warnings),
    )


def _list_evidence(verdict: Verdict) -> list[Figure]:
    """Return how predictions compare with what removals really did."""
    measured = verdict.figures
    best = (
        f"A perfect prediction would reach about {measured.ceiling:.2f}, since training runs differ by chance."
        if measured.ceiling is not None
        else "How close to 1 a perfect prediction could come is unknown: the removals were made in one training run."
    )
    figures = [
        Figure(
            "Correlation of predicted and real effects",
            _UNKNOWN if measured.correlation is None else f"{measured.correlation:.2f}",
            f"1 is perfect, 0 is chance. {best} {describe_p(verdict)}",
        ),
        Figure(
            "The same, guessing by size",
            _UNKNOWN if measured.by_size is None else f"{measured.by_size:.2f}",
            "What you reach if you only know how many training examples each source has. Predictions should do better.",
        ),
    ]
    if measured.slope is not None:
        ends = name_ends(measured.slope_low, measured.slope_high)
        calibrated = " It was set by these very removals, so it does not test itself." if verdict.calibrated else ""
        figures.append(
            Figure(
                "Real effect divided by predicted",
                f"{measured.slope:.2f}" + (f" ({ends})" if ends else " (interval unknown)"),
                f"1 is perfect; from {WITHIN[0]:g} to {WITHIN[1]:g} sizes count as right.{calibrated}",
            )
        )
    return figures


def _draw_slope(verdict: Verdict) -> Markup | None:
    measured = verdict.figures
    if measured.slope is None:
        return None
    return draw_ratio(
        "Real effect divided by predicted effect", measured.slope, measured.slope_low, measured.slope_high, WITHIN
    )


def _list_noise(asked: Summary, verdict: Verdict | None) -> list[Figure]:
    """Return how far chance alone moves the numbers."""
    figures = [
        _make_figure(
            "Queries that no source moves clearly",
            _describe_silent(asked),
            "Of the latest different queries since the service started: those of which no source's effect can be told "
            "from 0. This is a first look: where there are many sources, one of them often looks clear by chance.",
            "No query was answered yet, or nothing is known of how sure effects are.",
        ),
        _make_figure(
            "Noise floor",
            None if asked.noise is None else f"{asked.noise:.2g}",
            "How far chance, a tiny change of the training run's start, moves the measurement of a typical query. "
            "An effect counts as clear if it is more than twice the noise of its own query.",
            "Known for a replayed run that was repeated with a tiny change of its start.",
        ),
    ]
    if verdict is not None and verdict.chaos is not None:
        meaning = (
            "Noise divided by the effect of removing a source, on training examples. "
            f"{describe_chaos(verdict.chaos)} Single documents move less, so among them the same noise weighs more."
        )
        figures.append(Figure("Chaos", _format_share(verdict.chaos), meaning))
    if verdict is not None and verdict.deviation is not None:
        meaning = "How far a replay without any removal ends from the recorded run, divided by the effect of a removal."
        figures.append(Figure("Replay error", _format_share(verdict.deviation), meaning))
    return figures


def describe_chaos(chaos: float) -> str:
    """Say what a chaos figure means.

    >>> describe_chaos(0.15)
    'Small effects drown in noise, larger ones of whole sources can be used.'
    """
    if chaos > CHAOTIC:
        return "This run is chaotic: most effects are luck."
    if chaos > _CALM:
        return "Small effects drown in noise, larger ones of whole sources can be used."
    return "This run is calm: effects of whole sources stand out from noise."


def _make_figure(name: str, value: str | None, meaning: str, otherwise: str) -> Figure:
    """Return a figure with what it means, or otherwise why it is unknown."""
    return Figure(name, _UNKNOWN, otherwise) if value is None else Figure(name, value, meaning)


def _describe_silent(asked: Summary) -> str | None:
    share = asked.silent_share
    if share is None:
        return None
    described = count_of(asked.judged, "query", "queries")
    return f"{share.value:.0%} ({asked.silent:,} of {described}; 95% interval {share.low:.0%} to {share.high:.0%})"


def _format_share(share: float) -> str:
    return "below 0.001" if 0 < share < 0.001 else f"{share:.2g}"


def _draw_drift(validation: Validation | None, asked: Summary, measure: str) -> Markup | None:
    """Draw how large effects are now beside those of the validated queries; None if either is unknown."""
    if validation is None or validation.typical is None or asked.typical is None:
        return None
    validated = count_of(validation.verdict.figures.queries, "validated query", "validated queries")
    described = count_of(asked.different, "different query asked here", "different queries asked here")
    return draw_ranges(
        f"Size of effects on a query: change of {measure}, root mean square over sources",
        [(validated, validation.typical), (described, asked.typical)],
    )
