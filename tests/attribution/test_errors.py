"""Standard errors of expected effects: found from the spread of the runs, whatever is made of a result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imprint import Attribution, ReadoutError, StoreError
from imprint.attribution.replicates import Replicates
from tests.attribution.results import NOISE, SCORES, make_labels, make_repeated, make_replayed, make_result

FILES = Path(__file__).parent / "files"
RUNS = SCORES + torch.tensor(
    [[[0.5, -2.0, 1.0], [0.0, 1.0, -1.0]], [[-1.0, 1.0, 2.0], [0.5, 0.0, 3.0]], [[0.5, 1.0, -3.0], [-0.5, -1.0, -2.0]]],
    dtype=torch.float64,
)
"""Three runs of two queries and three sources, whose mean are the scores."""
OVER_RUNS = "standard errors over 3 runs"
LOWER = "standard errors over 3 checkpoints of one run: a lower bound, what the seed does is not in it"
MARK = "not distinguishable from 0: its 95% interval contains 0"


def repeated(runs: Tensor = RUNS, **changes: Any) -> Attribution:
    return make_repeated(runs, **{"details": {"error": OVER_RUNS}, **changes})


def spread_of(runs: Tensor) -> Tensor:
    """The standard error of the mean effect of equally weighted runs of scores, with N = 10."""
    found: Tensor = runs.std(0) / (10 * len(runs) ** 0.5)
    return found


def error_of(result: Attribution) -> Tensor:
    assert result.standard_error is not None
    return result.standard_error


def test_the_standard_error_is_that_of_the_mean_over_runs() -> None:
    torch.testing.assert_close(error_of(repeated()), spread_of(RUNS))


def test_shares_weigh_runs_as_they_do_in_the_mean() -> None:
    """Σw²/(1 − Σw²) · Σ w (x − x̄)²: a run that counts for nothing adds nothing, one that counts double is one run."""
    found = error_of(make_repeated(RUNS, (0.5, 0.25, 0.25)))
    mean = 0.5 * RUNS[0] + 0.25 * RUNS[1] + 0.25 * RUNS[2]
    squares = torch.einsum("r,rqs->qs", torch.tensor([0.5, 0.25, 0.25]).double(), (RUNS - mean).square())
    torch.testing.assert_close(found, (0.375 / 0.625 * squares).sqrt() / 10)


def test_an_interval_has_students_quantile_of_one_run_less() -> None:
    result = repeated()
    low, high = result.interval()
    torch.testing.assert_close(high - result.removal_effect, 4.302653 * error_of(result), rtol=1e-6, atol=0)
    torch.testing.assert_close(low + high, 2 * result.removal_effect)
    narrow = result.interval(0.5)
    torch.testing.assert_close(narrow[1] - result.removal_effect, 0.816497 * error_of(result), rtol=1e-5, atol=0)


@pytest.mark.parametrize("level", [0, 1, 95, -0.5, float("nan"), True, "95%", None])
def test_a_level_lies_between_0_and_1(level: Any) -> None:
    with pytest.raises(ReadoutError, match=r"level of an interval lies between 0 and 1, such as 0\.95"):
        repeated().interval(level)


def test_the_noise_of_a_run_is_the_error_of_its_effects() -> None:
    result = make_replayed()
    torch.testing.assert_close(error_of(result), torch.tensor([[0.1], [0.2]]).double().expand(2, 3))
    low, high = result.interval()  # two runs are two degrees of freedom: the noise is about 0, not about their mean
    torch.testing.assert_close(high - low, 2 * 4.302653 * error_of(result), rtol=1e-6, atol=0)
    group = result.group({"x": ["ann", "cid"]})
    torch.testing.assert_close(error_of(group), 3**0.5 * torch.tensor([[0.1], [0.2]]).double())
    both = make_replayed(noise=3 * NOISE) - make_replayed(noise=4 * NOISE)
    low, high = both.interval()  # two runs each, and as many degrees of freedom
    torch.testing.assert_close(high - low, 2 * 4.302653 * 5 * error_of(result), rtol=1e-6, atol=0)


# --- what is derived


def test_some_queries_keep_their_errors() -> None:
    torch.testing.assert_close(error_of(repeated()[1]), spread_of(RUNS)[1:])
    torch.testing.assert_close(error_of(repeated()[[1, 0]]), spread_of(RUNS)[[1, 0]])


def test_a_mean_over_queries_has_the_spread_of_the_means_of_each_run() -> None:
    torch.testing.assert_close(error_of(repeated().mean()), spread_of(RUNS.mean(1, keepdim=True)))
    shared = make_repeated(RUNS[:, :1].expand(3, 50, 3))
    torch.testing.assert_close(error_of(shared.mean()), error_of(shared)[:1])  # and not a seventh of it


def test_a_group_has_the_spread_of_the_sums_of_each_run() -> None:
    result = repeated().group({"x": ["ann", "cid"], "y": ["bob"]})
    torch.testing.assert_close(error_of(result), spread_of(torch.stack([RUNS[..., 0] + RUNS[..., 2], RUNS[..., 1]], 2)))
    torch.testing.assert_close(error_of(result.mean()), error_of(repeated().mean().group({"x": [0, 2], "y": [1]})))


def test_of_other_runs_the_squared_errors_add_up() -> None:
    other = make_repeated(3 * RUNS[:2].flip(2), names="xy", n=20, source_ids=("cid", "bob", "ann"))
    found = repeated() - other
    theirs = 3 * RUNS[:2].std(0) / 2**0.5 / 20
    torch.testing.assert_close(error_of(found), (spread_of(RUNS).square() + theirs.square()).sqrt())
    assert len(found.replicates) == 2 and found.details["error"] == (
        "standard errors of the first result over 3 runs; of the second over 2 runs"
    )
    torch.testing.assert_close(error_of(found.mean()), error_of(repeated().mean() - other.mean()))
    low, high = found.interval()  # Cochran's quantile lies between those of both
    half = (high - low) / 2 / error_of(found)
    assert bool((half > 4.3).all()) and bool((half < 12.71).all())


def test_of_the_same_runs_what_they_share_cancels() -> None:
    assert not bool(error_of(repeated() - repeated()).any())
    turned = make_repeated(2 * RUNS[[2, 0, 1]], names="cab")
    torch.testing.assert_close(error_of(repeated() - turned), spread_of(RUNS - 2 * RUNS))


@pytest.mark.parametrize(
    "other", [make_repeated(RUNS, names="abx"), make_repeated(RUNS, (0.5, 0.3, 0.2)), make_result()]
)
def test_a_difference_whose_error_is_unknown_says_so(other: Attribution) -> None:
    """Some runs in common but not all, the same weighted otherwise, or one result without errors."""
    for found in (repeated() - other, other - repeated()):
        assert found.standard_error is None and found.details["error"].startswith(
            "standard errors unknown: those of one"
        )
        with pytest.raises(ReadoutError, match="those of one result are, or the results have some runs in common"):
            found.interval()


class Doubled:
    """A ground truth of twice the effects."""

    def slope(self, result: Attribution, /) -> float:
        return 2.0


def test_errors_are_calibrated_with_the_scores() -> None:
    result = repeated().calibrate(Doubled())
    torch.testing.assert_close(error_of(result), 2 * spread_of(RUNS))
    torch.testing.assert_close(result.distinguishable, repeated().distinguishable)


def test_the_first_sources_keep_their_errors() -> None:
    result = repeated()
    top = result.top(2)
    assert top.standard_error is not None and top.distinguishable is not None and result.distinguishable is not None
    torch.testing.assert_close(top.standard_error, error_of(result).gather(1, top.indices))
    assert torch.equal(top.distinguishable, result.distinguishable.gather(1, top.indices))
    assert [credit.standard_error for credit in top[1]] == pytest.approx(top.standard_error[1].tolist())


# --- what is shown


def test_effects_are_distinguishable_where_the_interval_excludes_0() -> None:
    result = repeated()
    low, high = result.interval()
    assert result.distinguishable is not None
    assert torch.equal(result.distinguishable, (low > 0) | (high < 0))
    assert result.distinguishable.unique().tolist() == [False, True]  # both happen in this test
    certain = make_repeated(SCORES.expand(3, 2, 3) * 0)
    assert certain.distinguishable is not None and not bool(certain.distinguishable.any())  # 0 is not beside 0


def test_every_form_of_a_result_shows_errors_and_marks() -> None:
    result = repeated()
    marked = result.top(3)[0][2]
    assert marked.name == "Cid" and marked.distinguishable is False
    for text in (repr(result), repr(result.top(3))):
        assert f"\n{OVER_RUNS}\n" in text and f"\n~ {MARK}" in text and "Cid -0.05~" in text
    page = result._repr_html_()
    assert f"Cid <b>-0.05~</b> ± standard error {marked.format_error()}</td>" in page
    assert f"<p>{OVER_RUNS}</p>" in page and f"<p>~ {MARK}</p>" in page
    assert result.to_pandas("standard_error").loc[0, "ann"] == pytest.approx(float(error_of(result)[0, 0]))
    assert result.top(1).to_pandas()["standard_error"].tolist() == pytest.approx([0.1, 0.1528], abs=1e-4)
    values = result.top(1).to_json()
    assert values["details"]["error"] == OVER_RUNS
    assert values["queries"][0][0]["standard_error"] == pytest.approx(0.1)


def test_a_plot_has_lines_for_the_intervals() -> None:
    result = repeated()
    axes = result.plot(query=0)
    (lines,) = (found for found in axes.collections if hasattr(found, "get_segments"))
    ends = sorted(float(place) for segment in lines.get_segments() for place in segment[:, 0])
    assert ends == pytest.approx(sorted(torch.cat([each[0] for each in result.interval()]).tolist()))
    assert f"faint: {MARK}" in axes.get_xlabel() and f"lines: 95% intervals\n{OVER_RUNS}" in axes.get_xlabel()
    assert not [found for found in make_result().plot(query=0).collections if hasattr(found, "get_segments")]


def test_without_runs_nothing_is_known_of_errors() -> None:
    result = make_result(details={"error": "standard errors unknown: one checkpoint"})
    assert result.standard_error is None and result.distinguishable is None
    assert "\nstandard errors unknown: one checkpoint\n" in repr(result) and "±" not in result._repr_html_()
    for ask in (
        result.interval,
        lambda: result.to_pandas("standard_error"),
        lambda: result.to_pandas("distinguishable"),
    ):
        with pytest.raises(ReadoutError, match=r"nothing is known of the errors.*\(standard errors unknown: one check"):
            ask()
    with pytest.raises(ReadoutError, match=r"\(no runs to compare\).*checkpoints=\[\[\.\.\.\], \[\.\.\.\]\]"):
        make_result().interval()


# --- what is kept


def test_errors_are_saved_with_the_scores(tmp_path: Path) -> None:
    other = make_repeated(RUNS[:2], names="xy", over="checkpoints")
    for result in (repeated(), repeated().mean(), repeated() - other, repeated(over="checkpoints")):
        result.save(tmp_path / "result.safetensors")
        loaded = Attribution.load(tmp_path / "result.safetensors")
        assert torch.equal(error_of(loaded), error_of(result)) and repr(loaded) == repr(result)
        assert [(each.shares, each.names, each.over) for each in loaded.replicates] == [
            (each.shares, each.names, each.over) for each in result.replicates
        ]


def test_a_file_of_the_version_before_has_its_noise_and_no_runs() -> None:
    loaded = Attribution.load(FILES / "schema-3.safetensors")
    assert loaded.replicates == () and loaded.question == "this_run"
    torch.testing.assert_close(error_of(loaded), torch.tensor([[0.1], [0.2]]).double().expand(2, 3))
    assert "standard errors" not in repr(loaded)


WRONG: list[tuple[Any, str]] = [
    (Replicates(RUNS[:, :1], (0.5, 0.25, 0.25), tuple("abc")), r"shape \(3, 1, 3\), expected \(3, 2, 3\)"),
    (Replicates(RUNS, (0.5, 0.5), tuple("ab")), r"expected \(2, 2, 3\)"),
    (Replicates(RUNS[:1], (1.0,), ("a",)), "at least two positive numbers that add up to 1"),
    (Replicates(RUNS, (0.5, 0.5, 0.5), tuple("abc")), "add up to 1"),
    (Replicates(RUNS, (1.5, -0.25, -0.25), tuple("abc")), "positive"),
    (Replicates(RUNS, (0.5, 0.25, 0.25), tuple("ab")), "3 texts, one for each share"),
    (Replicates(RUNS * float("nan"), (0.5, 0.25, 0.25), tuple("abc")), "finite"),
    (Replicates(RUNS.long(), (0.5, 0.25, 0.25), tuple("abc")), "finite numbers"),
    (Replicates(RUNS, (0.5, 0.25, 0.25), tuple("abc"), "seeds"), "runs or checkpoints"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("replicates", "words"), WRONG)
def test_runs_that_cannot_be_are_not_saved(replicates: Replicates, words: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=words):
        replace(repeated(), replicates=(replicates,)).save(tmp_path / "result.safetensors")
    with pytest.raises(StoreError, match="at most two sets of runs"):
        replace(repeated(), replicates=3 * repeated().replicates).save(tmp_path / "result.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_details_about_errors_are_a_text(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must be a text"):
        Attribution(make_labels(details={"error": 1}), SCORES).save(tmp_path / "result.safetensors")


def test_a_lower_bound_is_called_one() -> None:
    from imprint.attribution.replicates import describe_replicates

    assert describe_replicates(repeated(over="checkpoints").replicates) == LOWER
    assert describe_replicates(repeated().replicates) == OVER_RUNS


def test_files_of_schema_4_know_no_owners_and_everything_else(tmp_path: Path) -> None:
    loaded = Attribution.load(FILES / "schema-4.safetensors")
    assert loaded.labels.source_about == () and loaded.labels.source_ids == ("ann", "bob", "cid")
    assert loaded.standard_error is not None and loaded.details == {}
    loaded.save(tmp_path / "again.safetensors")
    assert Attribution.load(tmp_path / "again.safetensors").labels == loaded.labels


@pytest.mark.parametrize(
    ("shares", "freedom"),
    [
        ((1 / 7,) * 7, 6),
        ((0.5, 0.5), 1),
        ((0.98, 0.02), 1),
        ((0.4, 0.4, 0.1, 0.1), 2),
        ((0.496, 0.496, *(0.001,) * 8), 1),
    ],
)
def test_runs_without_weight_add_no_degrees_of_freedom(shares: tuple[float, ...], freedom: int) -> None:
    """Runs of which two have nearly all of the weight are two draws: with nine degrees, 30% of claims were false."""
    result = make_repeated(torch.randn(len(shares), 2, 3), shares)
    assert result.replicates[0].freedom == freedom
