"""Renders the page of a statement, in words that need no other page."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from imprint.attribution.labels import MEANINGS, describe_question
from imprint.credit.heads import Head
from imprint.credit.money import PARTS, format_amount, format_share, format_units
from imprint.credit.policy import Policy
from imprint.display import count_of, name_some
from imprint.plan import Question
from imprint.templates import make_environment

if TYPE_CHECKING:
    from imprint.credit.statements import Figures

QUESTIONS: dict[Question, str] = {
    "this_run": "What counts is what your data did in the one training run that made the model, luck included.",
    "expected": "What counts is how much your data helps on average, if the model were trained again with other random "
    "choices; not what happened in one particular training.",
}
"""What each question pays for."""
_CHART = 99  # percent of its width that the longest bar takes


def render_statement(
    source: str,
    closing: dict[str, Any],
    line: dict[str, Any],
    figures: "Figures",
    policies: Mapping[str, Policy],
    head: Head,
    terms: Mapping[str, str],
    stem: str,
) -> str:
    """Return the page of a statement: self-contained, without scripts, fit for printing.

    closing, line: the closed period, and its line for the source.
    stem: the name of the files beside it.
    """
    environment = make_environment("imprint.credit", "statements", "serve")
    named = {sha256: policies[sha256] for sha256, _, _ in figures.reasons}
    page: str = environment.get_template("statement.html.j2").render(
        source=source,
        closing=closing,
        line=line,
        figures=figures,
        policies=named,
        head=head,
        terms=terms,
        stem=stem,
        currency=closing["currency"],
        paid=_format_units(line["units"], closing),
        chart=_draw_chart(closing, line),
        earned=_describe_outcomes(figures),
        pots=_describe_pots(figures, closing),
        questions=[_describe_question(each) for each in figures.questions],
        rules=_describe_rules(figures, named),
        tests=[_describe_validation(each) for each in figures.validations],
        sizes=[f"{size:,} of {n:,} training examples" for size, n in sorted(figures.sizes)],
        basis=_describe_basis(figures),
        needed=_describe_needed(figures, named),
        amount=format_amount,
        units=lambda count: _format_units(count, closing),
        convert=lambda share: _format_units(round(share * closing["total"] / closing["smallest"]), closing),
        percent=lambda share: "unknown" if share is None else format_share(share * PARTS),
        queries=lambda count: count_of(count, "query", "queries"),
    )
    return page


def _format_units(units: int, closing: dict[str, Any]) -> str:
    """Format whole units of the smallest amount that can be paid, all with the same number of decimals."""
    return format_units(units, closing["smallest"])


def _describe_outcomes(figures: "Figures") -> str:
    """Say how many queries earned something, and what became of the others."""
    outcomes, texts = figures.outcomes, list[str]()
    if count := outcomes["harmed"]:
        texts.append(f"{count} had a worse result because of it, by more than is “needed” below")
    if count := outcomes["unclear"]:
        texts.append(f"for {count} its effect, help or harm, is less than “needed”")
    if count := outcomes["uncredited"]:
        texts.append(f"for {count} the rule gives it nothing")
    others = f"; nothing is deducted for the others. Of those, {', and '.join(texts)}" if texts else ""
    paid = outcomes["paid"] or "none"
    return f"Of {count_of(figures.entries, 'query', 'queries')}, your source earned a share of {paid}{others}."


def _describe_pots(figures: "Figures", closing: dict[str, Any]) -> str:
    """Say where the money comes from."""
    texts = []
    for pot, count in figures.pots.most_common(3):
        if pot is not None:
            texts.append(f"{count_of(count, 'query', 'queries')} at {format_amount(pot)} {closing['currency']}")
    if count := figures.pots[None]:
        shared = f"{format_amount(closing['pot'] or 0)} {closing['currency']}"
        texts.append(f"{count_of(count, 'query', 'queries')} that share a pot of {shared} for the period")
    return name_some(texts, 4)


def _describe_question(encoded: str) -> str:
    """Say what is paid for; of a replay that was not of the whole run, how."""
    question, details = json.loads(encoded)
    exactly = describe_question(question, details)
    return QUESTIONS[question] + ("" if exactly == MEANINGS[question] else f" Exactly: {exactly}.")


def _describe_rules(figures: "Figures", policies: Mapping[str, Policy]) -> list[str]:
    """Say by which rules queries were credited, and why if it was a fallback."""
    texts = []
    for (sha256, rule, reason), count in figures.reasons.most_common():
        because = f" This rule was used because the policy's own rule may not be: {reason}." if reason else ""
        number = "" if count == figures.entries else f"{count_of(count, 'query', 'queries')}: "
        texts.append(f"{number}{policies[sha256].explain(rule)}{because}")  # type: ignore[arg-type]
    return texts


def _describe_validation(encoded: str) -> str:
    """Say how the method was tested, with the figures."""
    verdict = json.loads(encoded)
    if verdict is None:
        return "The method was not tested by retraining without a source: these effects are not validated."
    found = verdict["figures"]
    which = (
        "those that were credited" if verdict["own"] else "the log does not say whether they are among those paid here"
    )
    text = (
        "The payer tested the method by training without some sources: "
        f"{count_of(found['removals'], 'removal')}, of {count_of(found['sources'], 'different source')} in all, each "
        f"in {count_of(found['runs'], 'training run')}. Effects were compared on "
        f"{count_of(found['queries'], 'query', 'queries')} ({which})."
    )
    if found["correlation"] is not None:
        text += f" Predicted and real effects had a correlation of {found['correlation']:.2f}"
        if found["slope"] is not None and found["slope_low"] is not None:
            ends = f"{found['slope_low']:.2f} to {found['slope_high']:.2f}"
            text += f"; the ratio of real to predicted ones was {found['slope']:.2f} (95% interval {ends}). For both, 1"
        else:
            text += "; 1"
        text += " would be perfect."
        if verdict["calibrated"]:
            text += " The scale of the predictions was set by these same removals, so they do not test the ratio."
    outcomes = {
        "sizes validated": "The order and the size of effects were confirmed",
        "ranks validated": "The order of effects was confirmed, their size was not",
        "failed": "The test failed: effects were no better than chance",
        "undecided": "The test was too small to decide whether effects are right",
    }
    return f"{text} {outcomes[verdict['outcome']]}. This tests the method as a whole, not each number below."


def _describe_basis(figures: "Figures") -> str:
    """Say what the interval rests on."""
    runs = f"{' and '.join(map(str, sorted(figures.runs)))} training runs and " if figures.runs else ""
    return f"from {runs}{count_of(figures.entries, 'query', 'queries')}"


def _describe_needed(figures: "Figures", policies: Mapping[str, Policy]) -> str:
    """Say how “needed” follows from the standard error; empty if no rule that was applied has it."""
    noisy = [policies[sha256] for sha256, rule, _ in figures.reasons if rule in ("above_noise", "fixed_plus")]
    quantiles = sorted({f"{policy.find_quantile(each):.2f}" for policy in noisy for each in figures.freedoms})
    if not quantiles:
        return ""
    floor = ", or the smallest help that the rule credits if that is more" if any(each.floor for each in noisy) else ""
    return f"“Needed” is {' or '.join(quantiles)} times the standard error{floor}."


def _draw_chart(closing: dict[str, Any], line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bars of the page: what the source gets, with its interval, beside what its size alone would give."""
    total = closing["total"] or 1
    paid, by_size = line["amount"] / total, line["by_size"] / total
    ends = [] if line["low"] is None else [line["low"], line["high"]]
    scale = _CHART / max(paid, by_size, *ends, 1e-9)
    interval = f" ({format_share(ends[0] * PARTS)} to {format_share(ends[1] * PARTS)})" if ends else ""
    return [
        {
            "label": label,
            "kind": kind,
            "text": format_share(share * PARTS),
            "interval": known,
            "width": share * scale,
            "ends": [end * scale for end in whisker],
        }
        for label, kind, share, whisker, known in (
            ("Paid", "paid", paid, ends, interval),
            ("By size", "size", by_size, [], ""),
        )
    ]
