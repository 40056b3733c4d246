"""A benchmark finds what was planted, keeps what it made, and goes on where it stood."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imprint import Plan, StoreError
from imprint.benchmarking import bench as module
from imprint.benchmarking.bench import Bench, Method, Protocol, Runs
from imprint.benchmarking.comparison import Comparison, MethodScores
from imprint.benchmarking.methods import imprints, paths
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.statistics import mean_estimate
from tests.benches import little_digits, planted, toy

PLAN = Plan(engine="spectral", steps="infinite", damping=0.05, weight=(0, 1))
AT_THE_END = replace(PLAN, weight=1.0)


def given(scores: Tensor, **more: Any) -> Method:
    return Method(lambda bench, runs: [MethodScores(scores, prepare=0.5, query=0.25, **more)], {})


def drawn(seed: int, protocol: Any) -> Tensor:
    shape = (len(protocol.queries[1]), len(protocol.train.examples))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The toy with its truths and two runs; what is scored here stays here."""
    bench = Bench(toy(), tmp_path_factory.mktemp("toy"), progress=False)
    bench.states([0, 1])
    assert len(bench.truths) == 2
    return bench


def again(bench: Bench) -> Bench:
    return Bench(bench.protocol, bench.out, progress=False)


# --- what is compared


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    protocol = toy(queries=30, halves=100)
    true = drawn(0, protocol)
    bench = planted(true, 0.7, tmp_path_factory.mktemp("planted"), protocol)
    methods = {"random": given(drawn(1, protocol)), "Imprint": given(true), "blind": given(torch.zeros_like(true))}
    return bench.compare(methods, range(2))


def test_a_perfect_method_reaches_the_ceiling_and_a_random_one_nothing(comparison: Comparison) -> None:
    assert comparison.ceiling == pytest.approx(1 / (1 + 0.7**2) ** 0.5, abs=0.05)  # of Pearson's correlation
    assert comparison.estimate("Imprint").value == pytest.approx(comparison.ceiling, abs=0.03)
    assert abs(comparison.estimate("random").value) < 0.1
    assert comparison.lds["Imprint"].shape == (4, 30)  # two runs, two draws


def test_scores_are_compared_with_one_retraining_of_each_half(tmp_path: Path) -> None:
    protocol = toy(queries=30, halves=100)
    true = drawn(0, protocol)
    bench = planted(true, 0.0, tmp_path, protocol)
    for truth in bench.truths:
        truth.values[1] *= -1  # the second tells the noise, and is not looked at
    assert bench.compare({"Imprint": given(true)}, [0]).estimate("Imprint").value == pytest.approx(1)


def test_ahead_is_the_mean_of_differences_on_the_same_queries() -> None:
    values = np.random.default_rng(0).normal(size=(6, 50))
    found = Comparison("toy", {"a": values + 0.1, "b": values}, {}, {}, 0.7)
    ahead = found.ahead("a", "b")
    assert (ahead.value, ahead.low, ahead.high) == pytest.approx((0.1, 0.1, 0.1))  # though both vary widely
    assert found.estimate("a").high - found.estimate("a").low > 0.1
    other = np.random.default_rng(1).normal(size=(6, 50))
    unlike = replace(found, lds={"a": values, "b": other})
    assert unlike.ahead("a", "b") == mean_estimate(values.mean(0) - other.mean(0))
    assert unlike.ahead("a", "b").value == -unlike.ahead("b", "a").value


def test_queries_without_a_value_are_left_out() -> None:
    values = np.array([[0.5, np.nan, 0.1], [0.3, np.nan, np.nan]])
    found = Comparison("toy", {"a": values}, {}, {}, 0.7)
    assert found.estimate("a").value == pytest.approx((0.4 + 0.1) / 2)


def test_leave_one_out_is_of_the_loss_and_positive_helps(made: Bench) -> None:
    found = again(made).compare({"Imprint": imprints(PLAN)}, [0], leave_one_out=True)
    assert found.loo["Imprint"].shape == (1, 10)
    assert found.estimate("Imprint", "loo").value > 0.5  # convex, and trained without shuffling
    halves = paths(AT_THE_END, 1)
    assert "halves" not in again(made).compare({"halves": halves}, [0], leave_one_out=True).loo


def test_halves_as_sources_have_the_summed_scores_of_their_examples(made: Bench) -> None:
    each, halves = made.score(imprints(PLAN), 0), made.score(paths(AT_THE_END, 1), 0)
    kept = torch.cat([truth.subsets.membership() for truth in made.truths]).double()
    assert halves.halves and halves.scores.dtype == torch.float64
    torch.testing.assert_close(halves.scores, each.scores @ kept.T, rtol=1e-9, atol=1e-9)
    methods = {"each, summed": Method(lambda *_: [each], {}), "a half each": Method(lambda *_: [halves], {})}
    found = made.compare(methods, [0])
    np.testing.assert_array_equal(found.lds["each, summed"], found.lds["a half each"])
    assert found.estimate("each, summed").value > 0.5


# --- what is kept


def test_scores_are_made_once_and_taken_again(tmp_path: Path) -> None:
    protocol = toy(halves=20)
    bench = planted(drawn(0, protocol), 0.1, tmp_path, protocol)
    asked = 0

    def score(bench: Bench, runs: Runs) -> list[MethodScores]:
        nonlocal asked
        asked += 1
        return [MethodScores(drawn(asked, protocol), 1.0, 2.0, bytes=3, note="mine")]

    mine = Method(score, {})
    first = bench.compare({"mine": mine}, range(3))
    assert asked == 3
    second = bench.compare({"mine": mine}, range(3))
    np.testing.assert_array_equal(first.lds["mine"], second.lds["mine"])
    assert first.to_json() == second.to_json()
    kept = bench.scored("mine", mine, 1, leave_one_out=True)  # there is nothing to choose
    assert (kept.prepare, kept.query, kept.bytes, kept.note, kept.halves) == (1.0, 2.0, 3, "mine", False)
    torch.testing.assert_close(kept.scores, drawn(2, protocol))
    assert asked == 3
    bench.compare({"mine": mine}, range(4))
    assert asked == 4  # only what is missing


@pytest.mark.parametrize(
    "other", [imprints(replace(PLAN, damping=0.5)), imprints(), imprints(PLAN, runs=2), paths(PLAN, 1), paths(PLAN, 0)]
)
def test_under_the_same_name_another_method_is_scored_anew(tmp_path: Path, other: Method) -> None:
    protocol = toy()
    bench = planted(drawn(0, protocol), 0.1, tmp_path, protocol)
    was, now = drawn(1, protocol), drawn(2, protocol)
    first = replace(imprints(PLAN), score=given(was).score)
    torch.testing.assert_close(bench.scored("Imprint", first, 0).scores, was)
    assert first.key_text() == imprints(PLAN).key_text() != other.key_text()
    torch.testing.assert_close(bench.scored("Imprint", replace(other, score=given(now).score), 0).scores, now)
    torch.testing.assert_close(bench.scored("Imprint", replace(other, score=given(was).score), 0).scores, now)


def test_memory_is_that_of_scoring_without_the_training_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    bench = Bench(toy(), tmp_path, progress=False)
    train = bench._train

    def trained(runs: list[int], halves: bool) -> None:
        told.append("trained")
        train(runs, halves)

    class Peak:
        bytes = 7

        def __init__(self, device: torch.device) -> None:
            told.append("measured from here")

    monkeypatch.setattr(module, "Peak", Peak)
    monkeypatch.setattr(bench, "_train", trained)
    method = replace(given(drawn(0, bench.protocol)), runs=3, halves=True)
    assert bench.score(method, 1).peak_bytes == 7
    assert told == ["trained", "measured from here"]
    assert [path.stem for path in sorted((tmp_path / "runs").iterdir())] == ["half-003", "half-004", "half-005"]


# --- the best of several settings


def without_each(scores: Tensor) -> Truth:
    """A truth in which examples with positive scores lower the loss."""
    subsets = Subsets.without_each(scores.shape[1])
    return Truth(subsets, -(subsets.membership().double() @ scores.double().T)[None], "loss")


@pytest.fixture
def chosen(tmp_path: Path) -> tuple[Bench, Method, list[int]]:
    """A benchmark whose truths are planted, with a method that has one setting for each; and how often it scored."""
    protocol = toy(halves=30)
    groups, singles, count = drawn(0, protocol), drawn(1, protocol), [0]
    bench = planted(groups, 0.1, tmp_path, protocol)
    bench.__dict__["loo_truth"] = without_each(singles)

    def score(bench: Bench, runs: Runs) -> list[MethodScores]:
        count[0] += 1
        broken = torch.full_like(groups, torch.nan)
        every = {"λ=1": singles, "λ=2": groups, "λ=3": broken, "λ=4": torch.zeros_like(groups)}
        return [MethodScores(each, float(i), 2.0, note=note) for i, (note, each) in enumerate(every.items())]

    return bench, Method(score, {}), count


def test_each_measure_has_its_own_best_setting(chosen: tuple[Bench, Method, list[int]]) -> None:
    bench, method, count = chosen
    found = bench.compare({"varied": method}, [0], leave_one_out=True)
    assert found.estimate("varied").value > 0.9 and found.estimate("varied", "loo").value > 0.99
    assert found.to_json()["methods"]["varied"]["notes"] == ["λ=2 by LDS and λ=1 by LOO, the best of 3"]
    assert found.costs["varied"][0].prepare == 1.0  # of the best by LDS
    assert bench.compare({"varied": method}, [0], leave_one_out=True).to_json() == found.to_json()
    assert bench.compare({"varied": method}, [0]).estimate("varied") == found.estimate("varied")
    assert count == [1]


def test_what_was_chosen_by_lds_alone_is_chosen_again_for_loo(chosen: tuple[Bench, Method, list[int]]) -> None:
    bench, method, count = chosen
    first = bench.scored("varied", method, 0)
    assert first.note == "λ=2, the best of 3" and first.loo_scores is None
    assert bench.scored("varied", method, 0, leave_one_out=True).loo_scores is not None
    assert count == [2]


def test_one_setting_may_be_the_best_by_both(chosen: tuple[Bench, Method, list[int]]) -> None:
    bench, _, _ = chosen
    scores = drawn(0, bench.protocol)
    both = Method(lambda *_: [MethodScores(scores, 0, 0, note="a"), MethodScores(0 * scores, 0, 0, note="b")], {})
    bench.__dict__["loo_truth"] = without_each(scores)
    assert bench.scored("both", both, 0, leave_one_out=True).note == "a by LDS and a by LOO, the best of 2"


# --- what is refused


def test_what_was_made_is_not_made_again(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = again(made)
    states, values = bench.states([0, 1]), [truth.values for truth in bench.truths]

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train_together", refused)
    bench = again(made)
    assert all(torch.equal(a, b) for a, b in zip(values, (truth.values for truth in bench.truths), strict=True))
    for mine, kept in zip(states, bench.states([0, 1]), strict=True):
        assert len(mine) == 2  # epoch 3, and the end
        assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, kept, strict=True) for name in a)
    with pytest.raises(AssertionError, match="trained again"):
        bench.states([2])


def test_a_run_is_the_same_whichever_are_trained_beside_it(made: Bench, tmp_path: Path) -> None:
    alone = Bench(made.protocol, tmp_path, progress=False).states([1])[0]
    beside = made.states([0, 1])[1]
    for a, b in zip(alone, beside, strict=True):
        torch.testing.assert_close(a, b)
    other = made.states([0])[0]
    assert not torch.equal(other[-1]["weight"], beside[-1]["weight"])


def test_runs_on_halves_are_others(made: Bench) -> None:
    half, full = made.states([0], halves=True)[0][-1], made.states([0])[0][-1]
    assert float((half["weight"] - full["weight"]).norm()) > 0.05


def other_training(protocol: Protocol) -> Protocol:
    return replace(protocol, train=replace(protocol.train, training=replace(protocol.train.training, lr=0.4)))


def other_data(protocol: Protocol) -> Protocol:
    x, y = protocol.train.examples.gather(torch.arange(40))
    return replace(protocol, train=replace(protocol.train, data=(x + 0.1 * (torch.arange(40) == 7)[:, None], y)))


def other_model(protocol: Protocol) -> Protocol:
    return replace(protocol, train=replace(protocol.train, build=lambda: torch.nn.Linear(4, 3, bias=False).double()))


def other_queries(protocol: Protocol) -> Protocol:
    return replace(protocol, queries=tuple(part.flip(0) for part in protocol.queries))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (other_training, "its training"),
        (other_data, "the data"),
        (other_model, "its model"),
        (other_queries, "its queries"),
    ],
)
def test_what_was_made_of_other_things_is_not_taken(
    made: Bench, other: Callable[[Protocol], Protocol], named: str
) -> None:
    with pytest.raises(StoreError, match=rf"holds another benchmark: {named} changed\. Give a new folder"):
        Bench(other(made.protocol), made.out)
    again(made)


@pytest.mark.parametrize(
    "changed", [{"name": "other"}, {"halves": 13}, {"draws": (1, 2, 3)}, {"checkpoints": (2,)}, {"path": PLAN}]
)
def test_another_benchmark_in_the_same_folder_is_refused(made: Bench, changed: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match=r"holds another benchmark: its \w+ changed\. Give a new folder"):
        Bench(replace(made.protocol, **changed), made.out)
    again(made)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file"):
        Bench(toy(), tmp_path / "file")


def test_a_checkpoint_at_the_end_is_kept_once(made: Bench) -> None:
    protocol = made.protocol
    assert protocol.epochs == [3, 30]
    assert replace(protocol, checkpoints=(30, 3)).epochs == [3, 30]


# --- what is shown


def test_the_table_has_the_best_first_and_the_undefined_last(comparison: Comparison) -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in comparison.to_markdown().splitlines()[2:5]]
    assert rows == ["Imprint", "random", "blind"]
    assert "| blind | undefined |" in comparison.to_markdown()
    assert f"about {comparison.ceiling:.2f} against one retraining" in comparison.to_markdown()
    assert "0.5 s | 0.25 s" in comparison.to_markdown() and "LOO" not in comparison.to_markdown()
    singles = replace(comparison, loo={"Imprint": comparison.lds["Imprint"]}).to_markdown().splitlines()
    assert (
        singles[0].startswith("| method | LDS | behind | LOO | behind |")
        and len({line.count("|") for line in singles[:5]}) == 1
    )


def test_what_a_method_is_behind_the_first_is_told_of_pairs(comparison: Comparison) -> None:
    assert comparison.first == "random"
    behind = comparison.ahead("random", "Imprint")
    assert behind.high < 0  # the first is worse than the second, query by query
    row = next(line for line in comparison.to_markdown().splitlines() if line.startswith("| Imprint"))
    assert f"{behind.value:.3f} [{behind.low:.3f}, {behind.high:.3f}]" in row
    assert comparison.to_json()["methods"]["Imprint"]["behind"]["lds"]["high"] == behind.high
    assert "behind" not in comparison.to_json()["methods"]["random"]
    one = next(line for line in comparison.to_markdown().splitlines() if line.startswith("| random"))
    assert one.split(" | ")[2] == ""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    bench = Bench(toy(), tmp_path, progress=False)
    with bench.alone(), pytest.raises(StoreError, match=r"another process .* is writing to"), again(bench).alone():
        pass
    with again(bench).alone():
        pass


def test_json_is_strict(comparison: Comparison) -> None:
    values = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert values["methods"]["blind"]["lds"] == {"value": None, "low": None, "high": None}
    found = values["methods"]["Imprint"]
    assert found["lds"]["low"] < found["lds"]["value"] < found["lds"]["high"]
    assert found["prepare"] == [0.5, 0.5] and len(found["peak_bytes"]) == 2
    one_run = replace(comparison, ceiling=float("nan"))
    assert one_run.to_json()["ceiling"] is None
    assert "perfect" not in one_run.to_markdown()


def test_a_picture_is_drawn(comparison: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    comparison.plot(tmp_path / "lds.png")
    replace(comparison, loo={"Imprint": comparison.lds["Imprint"]}).plot(tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "lds.png").stat().st_size > 5000


# --- a small form of the real thing


def test_a_small_benchmark_on_digits(tmp_path: Path) -> None:
    protocol = little_digits(examples=100, halves=20)
    bench = Bench(protocol, tmp_path, progress=False)
    found = bench.compare({"Imprint": imprints()}, [0])
    assert 0.1 < found.estimate("Imprint").value < found.ceiling + 0.1
    assert found.costs["Imprint"][0].note.startswith("spectral, damping [")


def test_several_runs_are_attributed_together(made: Bench) -> None:
    scores = [made.score(imprints(PLAN), run).scores for run in (0, 1)]
    both = made.score(imprints(replace(PLAN, weight=(0, 1, 0, 1)), runs=2), 0)
    torch.testing.assert_close(both.scores, (scores[0] + scores[1]) / 2)
