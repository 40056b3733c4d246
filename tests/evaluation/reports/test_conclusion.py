"""The words of a report say what the verdict says, name what is unknown, and advise what follows from both."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from imprint import Attribution, Sources
from imprint.evaluation.reports.conclusion import Conclusion, conclude
from imprint.evaluation.reports.findings import Findings, collect_findings
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from tests.evaluation.planted import attribution, draw, planted, scores_for
from tests.evaluation.reports.pages import HALVES, KINDS, PAIRS, SINGLES, compared

MANY = Subsets.without_each(12)
QUERIES = 40


def judged(size: float = 1.0, runs: int = 4, queries: int = QUERIES, sign: float = 1.0, **changes: Any) -> Findings:
    """Scores of twelve sources that are right but for their size, their sign and a little noise."""
    scores = scores_for(MANY, queries)
    truth = planted(scores, MANY, runs=runs, noise=0.1, size=size)
    return collect_findings(attribution(sign * scores, MANY, **changes), truth)


def advice(found: Conclusion) -> str:
    return " ".join(found.advice)


@pytest.mark.parametrize(
    ("findings", "outcome", "does"),
    [
        (judged(), "sizes validated", "Use the effects as they are"),
        (judged(size=5), "ranks validated", "Rely on the order of the sources, and not on the size"),
        (judged(sign=-1), "failed", "Do not use these effects"),
        (judged(queries=5), "undecided", "Evaluate at least 20 queries; these are 5."),
        (judged(runs=1), "undecided", "with `--runs 3`"),
    ],
    ids=["good", "too small", "reversed", "few queries", "one run"],
)
def test_the_words_are_those_of_the_verdict(findings: Findings, outcome: str, does: str) -> None:
    found = conclude(findings)
    assert found.outcome == findings.verdict.outcome == outcome
    assert found.reason[1:].startswith(findings.verdict.reason[1:])
    assert found.evidence == findings.verdict.evidence
    assert does in advice(found)


def test_every_outcome_advises_something() -> None:
    for findings in (judged(), judged(size=5), judged(sign=-1), judged(queries=5), judged(runs=1), judged(size=0)):
        assert conclude(findings).advice


def test_a_scale_that_is_known_well_is_offered() -> None:
    assert "result.calibrate(truth)" in advice(conclude(judged(size=5)))
    assert "result.calibrate(truth)" in advice(conclude(judged(size=1.6)))
    assert "calibrate" not in advice(conclude(judged()))  # its interval holds 1


@pytest.mark.parametrize("subsets", KINDS.values(), ids=KINDS.keys())
def test_the_slope_of_the_verdict_is_that_of_evaluate(subsets: Subsets) -> None:
    findings = collect_findings(*compared(subsets))
    slopes = [metric.estimate.value for metric in findings.metrics if metric.name.startswith("slope")]
    near = 0.1 if subsets is PAIRS else 1e-9  # sets of one and of two sources, whose models weigh examples differently
    assert all(slope == pytest.approx(findings.verdict.figures.slope, rel=near) for slope in slopes)
    assert len(slopes) == (subsets in (SINGLES, PAIRS))


def test_exact_scores_of_halves_have_the_right_size() -> None:
    scores = scores_for(HALVES, QUERIES)
    findings = collect_findings(attribution(scores, HALVES), planted(scores, HALVES, runs=3, noise=1e-3))
    assert findings.verdict.figures.slope == pytest.approx(1.0, rel=0.02)


def test_random_scores_of_halves_are_not_validated_by_what_halves_share() -> None:
    """Halves of five sources share most of them, so that they are no independent evidence."""
    outcomes = []
    for seed in range(0, 80, 2):
        parts = [draw(QUERIES, 5, seed=each) + draw(1, 5, seed=900 + each) for each in (seed, seed + 1)]
        findings = collect_findings(attribution(parts[0], HALVES), planted(parts[1], HALVES, runs=3, noise=0.1))
        outcomes.append(findings.verdict.outcome)
    assert sum(outcome.endswith("validated") for outcome in outcomes) <= 4


def test_of_very_many_removals_some_are_judged_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imprint.evaluation.reports.judging.MOST", 8)
    findings = judged()
    assert findings.verdict.figures.removals == 8
    assert "The verdict looks at 8 of the 12 removals, drawn at random." in conclude(findings).certainty


def replayed(subsets: Subsets) -> tuple[Attribution, Truth]:
    scores = scores_for(subsets, QUERIES)
    truth = replace(planted(scores, subsets), question="this_run", replayed=True)
    return attribution(scores, subsets, question="this_run", removes=True), truth


def test_replays_that_agree_with_themselves_validate_nothing() -> None:
    found = conclude(collect_findings(*replayed(SINGLES)))
    assert found.outcome == "not validated" and "agree by construction" in found.reason
    assert "--kind unions" in advice(found) and found.evidence == ""
    assert conclude(collect_findings(*replayed(PAIRS))).outcome != "not validated"


def test_scores_that_are_no_removals_are_judged_by_single_replays() -> None:
    result, truth = replayed(SINGLES)
    path = replace(result, labels=replace(result.labels, removes=False))
    assert conclude(collect_findings(path, truth)).outcome != "not validated"


@pytest.mark.parametrize(
    ("chaos", "says"), [(0.02, "stand out clearly"), (0.2, "small effects drown"), (1.5, "this run is chaotic")]
)
def test_the_chaos_figure_is_explained(chaos: float, says: str) -> None:
    result, truth = replayed(PAIRS)
    result = replace(result, labels=replace(result.labels, details={"chaos": chaos}))
    found = conclude(collect_findings(result, truth))
    assert says in " ".join(found.certainty)
    assert ("Ask for the expectation over seeds" in advice(found)) == (chaos > 0.3)


def test_what_a_guess_reaches_and_what_is_possible_stand_beside_a_figure() -> None:
    sources = Sources.groups({"a": range(3), "b": range(3, 8), "c": range(8, 15), "d": range(15, 20)})
    unequal = Subsets.without_each(sources, n=20)
    scores = draw(QUERIES, 4, seed=2)
    findings = collect_findings(attribution(scores, unequal), planted(scores, unequal, runs=3, noise=0.4))
    sentence = conclude(findings).agreement[0]
    first, guess = findings.metrics[0], findings.guesses["size"][0]
    assert f"{first.estimate.format(2)}" in sentence
    assert f"about {first.ceiling:.2f} against this ground truth" in sentence
    assert f"a guess by size reaches {guess.estimate.value:.2f}" in sentence


def test_halves_are_called_halves() -> None:
    found = conclude(collect_findings(*compared(HALVES)))
    assert "linear datamodelling score" in found.agreement[0]
    assert "For every half, a model was trained in 4 runs" in found.certainty[0]


def test_a_part_of_a_run_is_named() -> None:
    result, truth = replayed(PAIRS)
    part = replace(result, labels=replace(result.labels, details={"last_steps": 40}))
    assert "weight 0 in its last 40 steps in the very training run" in conclude(collect_findings(part, truth)).asked


def test_the_validation_that_scores_carry_is_shown_too() -> None:
    earlier = judged().verdict
    findings = judged(validation=earlier)
    assert str(earlier) in " ".join(conclude(findings).certainty)


def test_scores_and_ground_truth_of_two_recorded_runs_are_noticed() -> None:
    result, truth = replayed(SINGLES)
    truth = replace(truth, about={"training": {"recording": "b" * 64}})
    store: Any = _FakeStore("a" * 64)
    findings = collect_findings(result, truth, store=store)
    assert "two different recorded runs" in " ".join(findings.notes)
    assert conclude(findings).outcome != "not validated"
    same: Any = _FakeStore("b" * 64)
    assert conclude(collect_findings(result, truth, store=same)).outcome == "not validated"


class _FakeStore:
    """What a report reads of a store: its recording, and how far the replay deviates."""

    def __init__(self, recording: str) -> None:
        self.checkpoints = (SimpleNamespace(measured=SimpleNamespace(deviation=0.0)),)
        self.manifest = SimpleNamespace(request=SimpleNamespace(recording=recording))
