"""What chance does to the outputs of a run, and which effects stand out from it."""

import warnings
from pathlib import Path

import pytest
import torch

from imprint import Attribution, ReadoutError, StoreError
from imprint.attribution.noise import describe_chaos, measure_chaos, widen
from tests.attribution.results import NOISE, SCORES, make_replayed, make_result

STANDS_OUT = [[True, True, False], [False, False, True]]


def test_noise_is_the_root_mean_square_over_the_runs() -> None:
    changes = torch.tensor([[3.0, 1.0], [-4.0, 1.0]])
    noise = make_replayed(noise=changes).noise
    torch.testing.assert_close(noise, torch.tensor([12.5**0.5, 1.0], dtype=torch.float64))


def test_effects_stand_out_above_twice_the_noise() -> None:
    result = make_replayed()
    assert result.distinguishable is not None and result.distinguishable.tolist() == STANDS_OUT
    exact = make_replayed(SCORES * 0, NOISE * 0).distinguishable
    assert exact is not None and not bool(exact.any())  # nothing is distinguishable from itself


def test_without_noise_rows_nothing_is_said_of_noise() -> None:
    result = make_result()
    assert result.noise is None and result.distinguishable is None
    assert {credit.distinguishable for credits in result.top(3) for credit in credits} == {None}
    assert "~" not in repr(result) and "distinguishable" not in result._repr_html_()
    assert result.top(1).to_json()["noise"] is None
    with pytest.raises(
        ReadoutError, match=r"nothing is known of the errors of these effects.*simulate\(\.\.\., run=\)"
    ):
        result.to_pandas("distinguishable")


def test_every_form_of_a_result_marks_what_does_not_stand_out() -> None:
    result = make_replayed()
    explained = "not distinguishable from 0: less than twice the change of F by a tiny change of the run's start"
    assert "query 0: Bob <b> +0.6, Ann -0.3, Cid -0.05~\n" in repr(result)
    assert f"\n~ {explained}" in repr(result) and repr(result).count(explained) == 1
    assert "Cid <b>-0.05~</b>" in result._repr_html_() and "~ not distinguishable from 0" in result._repr_html_()
    top = result.top(3)
    marks = {(credit.query, credit.source): credit.distinguishable for credits in top for credit in credits}
    rows = [[marks[query, source] for source in result.labels.source_ids] for query in (0, 1)]
    assert rows == STANDS_OUT
    assert top.distinguishable is not None and top.distinguishable.tolist()[0] == [True, True, False]
    assert top.to_pandas()["distinguishable"].tolist()[:3] == [True, True, False]
    assert result.to_pandas("distinguishable").to_numpy().tolist() == STANDS_OUT
    assert top.to_json()["noise"] == pytest.approx([0.1, 0.2])
    assert "~" not in repr(result[:1].top(2))  # a mark is explained where it is shown


def test_bars_of_what_does_not_stand_out_are_faint() -> None:
    axes = make_replayed().plot(query=0)
    faint = [bar.get_alpha() is not None for bar in axes.patches]
    assert faint == [True, False, False]  # the smallest is drawn first
    assert "faint: not distinguishable from 0" in axes.get_xlabel()
    assert "faint" not in make_result().plot().get_xlabel()


def test_the_noise_of_a_mean_is_that_of_the_mean_of_f() -> None:
    """Changes that cancel over queries are no noise of their mean."""
    result = make_replayed(noise=torch.tensor([[0.3, -0.3], [0.1, 0.1]]))
    mean = result.mean()
    assert mean.noise is not None and float(mean.noise) == pytest.approx(0.1 / 2**0.5)
    opposed = make_replayed(noise=torch.tensor([[0.3, -0.3]])).mean().noise
    assert opposed is not None and float(opposed) == pytest.approx(0.0, abs=1e-8)


def test_some_queries_keep_their_noise() -> None:
    part = make_replayed()[1:]
    assert part.noise is not None and part.noise.tolist() == pytest.approx([0.2])
    assert part.distinguishable is not None and part.distinguishable.tolist() == STANDS_OUT[1:]


class Doubled:
    """A ground truth of twice the effects."""

    def slope(self, result: Attribution, /) -> float:
        return 2.0


def test_noise_is_calibrated_with_the_scores() -> None:
    result = make_replayed().calibrate(Doubled())
    assert result.noise is not None and result.noise.tolist() == pytest.approx([0.2, 0.4])
    assert result.distinguishable is not None and result.distinguishable.tolist() == STANDS_OUT


def test_noise_is_saved_with_the_scores(tmp_path: Path) -> None:
    result = make_replayed()
    result.save(tmp_path / "result.safetensors")
    loaded = Attribution.load(tmp_path / "result.safetensors")
    assert loaded.noise_changes is not None and torch.equal(loaded.noise_changes, NOISE)
    assert repr(loaded) == repr(result) and loaded.labels == result.labels


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (torch.zeros(2, 3), r"its noise has shape \(2, 3\), expected \(runs, 2 queries\)"),
        (torch.zeros(2), r"shape \(2,\)"),
        (torch.zeros(0, 2), r"shape \(0, 2\)"),
        (torch.full((1, 2), float("nan")), "finite"),
        (torch.zeros(1, 2, dtype=torch.int64), "finite numbers"),
    ],
)
def test_noise_that_cannot_be_is_not_saved(noise: torch.Tensor, words: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=words):
        make_replayed(noise=noise).save(tmp_path / "result.safetensors")


def test_the_noise_of_a_sum_counts_the_common_model_once_for_each_removal() -> None:
    """Σ(x_b − x_0) over k runs with independent deviations, drawn many times."""
    generator = torch.Generator().manual_seed(0)
    runs = torch.randn(20_000, 8, generator=generator, dtype=torch.float64)
    for k in (1, 2, 5):
        single = (runs[:, 1] - runs[:, 0]).square().mean().sqrt()
        total = (runs[:, 1 : k + 1] - runs[:, :1]).sum(1).square().mean().sqrt()
        assert float(total) == pytest.approx(float(widen(single, torch.tensor(k))), rel=0.03)


def test_chaos_is_the_noise_over_the_effects() -> None:
    assert measure_chaos(0.1, 0.4) == pytest.approx(0.25)
    assert measure_chaos(0.1, 0.0) is None
    assert describe_chaos(0.1, 0.4) is None and describe_chaos(0.0, 0.0) is None
    message = describe_chaos(0.2, 0.4)
    assert message is not None and message.startswith("this run is chaotic: a tiny change of its start moves")
    assert "Ask instead for the expectation over seeds" in message and "checkpoints=run.paths" in message


def test_a_run_that_no_source_changes_is_not_called_chaotic() -> None:
    """Its noise is larger than its effects however calm it is, such as one of learning rate 0."""
    assert describe_chaos(0.2, 0.0) is None


def test_chaos_follows_the_queries() -> None:
    for part, noise in ((make_replayed()[:1], 0.1), (make_replayed()[1:], 0.2)):
        expected = noise / float(part.removal_effect.square().mean().sqrt())
        assert part.details["chaos"] == pytest.approx(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, where queries are attributed
        mean = make_replayed().mean()
    assert mean.details["chaos"] == pytest.approx(0.05 / float(mean.removal_effect.square().mean().sqrt()))
    assert "chaos" not in make_result().mean().details
