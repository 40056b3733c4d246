"""An estimate of the expectation and replays of a few runs, combined: better than either on planted effects."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from imprint import Attribution, ReadoutError, combine
from imprint.attribution.combining import weigh
from tests.attribution.results import make_replayed, make_result

QUERIES, SOURCES = 100, 20


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plant(runs: int, luck: float = 1.0, error: float = 0.7, scale: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """True effects, an estimate that is too small and has errors, and runs that have luck."""
    truth = draw(QUERIES, SOURCES, seed=0)
    estimate = scale * (truth + error * draw(QUERIES, SOURCES, seed=1))
    return truth, estimate, truth + luck * draw(runs, QUERIES, SOURCES, seed=2)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).square().mean())


@pytest.mark.parametrize("runs", [1, 2, 4, 8])
def test_the_combination_is_closer_to_the_truth_than_either(runs: int) -> None:
    truth, estimate, replayed = plant(runs)
    found, slope, weight = weigh(estimate, replayed)
    assert distance(found, truth) < min(distance(slope * estimate, truth), distance(replayed.mean(0), truth))
    assert 0 < weight < 1


def test_the_weight_of_replays_is_that_of_their_precision() -> None:
    """w = ω²/(ω² + σ²/k), with ω² the error of the scaled estimate; both are planted."""
    for runs, luck in ((2, 1.0), (8, 1.0), (20, 2.0)):
        _, estimate, replayed = plant(runs, luck)
        _, slope, weight = weigh(estimate, replayed)
        residual = 1 - 1 / (1 + 0.7**2)  # of the truth about its regression on the estimate
        assert weight == pytest.approx(residual / (residual + luck**2 / runs), rel=0.25)
        assert slope == pytest.approx(2 / (1 + 0.7**2), rel=0.15)


def test_a_single_replay_has_a_quarter_of_the_weight() -> None:
    assert weigh(*plant(1)[1:])[2] == 0.25


def test_replays_without_luck_decide_alone() -> None:
    truth, estimate, replayed = plant(3, luck=0.0)
    found, _, weight = weigh(estimate, replayed)
    assert weight == pytest.approx(1) and distance(found, truth) == pytest.approx(0, abs=1e-20)


def results(runs: int = 2) -> tuple[Attribution, list[Attribution]]:
    _, estimate, replayed = plant(runs)
    ids = tuple(f"source {index}" for index in range(SOURCES))
    about: dict[str, Any] = {"source_ids": ids, "source_names": ids, "source_sizes": (1,) * SOURCES, "n": 100}
    first = make_result(-100 * estimate, **about, warnings=("early",))
    return first, [make_result(-100 * run, **about, question="this_run", removes=True) for run in replayed]


def test_the_result_answers_the_expectation_and_says_how_it_was_made() -> None:
    estimate, replays = results()
    found = combine(replays, estimate)
    expected, slope, weight = weigh(estimate.removal_effect, torch.stack([r.removal_effect for r in replays]))
    torch.testing.assert_close(found.removal_effect, expected)
    assert found.question == "expected" and not found.labels.removes and found.warnings == ("early",)
    assert found.details["combined_replays"] == 2 and found.details["combined_weight"] == weight
    assert found.details["combined_slope"] == slope
    assert found.standard_error is None and found.details["error"].startswith("standard errors unknown: how far")


def test_the_mean_of_replays_has_standard_errors_over_runs() -> None:
    _, replays = results(runs=5)
    found = combine(replays)
    effects = torch.stack([each.removal_effect for each in replays])
    torch.testing.assert_close(found.removal_effect, effects.mean(0))
    assert found.standard_error is not None
    torch.testing.assert_close(found.standard_error, effects.std(0) / 5**0.5)
    assert found.question == "expected" and "over 5 runs" in found.details["error"]
    assert "store" not in found.labels.fingerprints


def test_sources_are_paired_by_their_ids() -> None:
    estimate, replays = results()
    turned = [
        make_result(each.scores.flip(1), **{**vars(each.labels), "source_ids": each.labels.source_ids[::-1]})
        for each in replays
    ]
    torch.testing.assert_close(combine(turned, estimate).scores, combine(replays, estimate).scores)


def test_results_that_do_not_belong_together_are_refused() -> None:
    estimate, replays = results()
    for given in ([], replays[:1]):
        with pytest.raises(ReadoutError, match=f"{len(given)} repeated runs? without an estimate tell nothing"):
            combine(given)
    with pytest.raises(ReadoutError, match="the estimate must answer 'expected', and answers 'this_run'"):
        combine(replays, replays[0])
    with pytest.raises(ReadoutError, match="replay 1 answers 'expected'"):
        combine([replays[0], estimate])
    with pytest.raises(ReadoutError, match="different sources"):
        combine([make_replayed()], estimate)
    same = [replace(each, labels=replace(each.labels, fingerprints={"recording": "r"})) for each in replays]
    with pytest.raises(ReadoutError, match="two are of the same recording"):
        combine(same)
    with pytest.raises(ReadoutError, match="do not rise together"):
        combine([make_result(-each.scores, **vars(each.labels)) for each in replays], estimate)


@pytest.mark.parametrize(("signers", "expected"), [(("k", "k"), "k"), (("k", None), None), (("k", "other"), None)])
def test_a_combination_is_signed_only_if_every_part_is_by_the_same_key(
    signers: tuple[str | None, ...], expected: str | None
) -> None:
    """Otherwise one signed store would let a ledger credit effects of stores that nobody has signed."""
    signed = []
    for replayed, signer in zip(results()[1], signers, strict=True):
        prints = {name: value for name, value in replayed.labels.fingerprints.items() if name != "signer"}
        prints |= {} if signer is None else {"signer": signer}
        signed.append(replace(replayed, labels=replace(replayed.labels, fingerprints=prints)))
    assert combine(signed).labels.fingerprints.get("signer") == expected
