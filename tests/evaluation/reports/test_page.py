"""A report holds every source with the numbers of the evaluation, asks its question in words, and loads nothing."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import About, DataError, MissingExtra, Sources, StoreError
from imprint.evaluation import Illustrations, Preface, evaluate, list_effects, write_report
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from tests.evaluation.planted import N, attribution
from tests.evaluation.reports.pages import EACH, HALVES, KINDS, PAIRS, SINGLES, compared, reported

every_kind = pytest.mark.parametrize("subsets", KINDS.values(), ids=KINDS.keys())


@every_kind
def test_every_source_is_in_the_table_with_its_size_and_predicted_effect(tmp_path: Path, subsets: Subsets) -> None:
    result, truth = compared(subsets)
    rows = reported(tmp_path, result, truth).table("source")
    assert sorted(rows) == sorted(subsets.sources.names)
    for place, name in enumerate(subsets.sources.names):
        predicted, size = rows[name][0], rows[name][-2]
        assert int(size) == subsets.sources.sizes[place]
        effect = float(result.removal_effect[:, place].mean())
        assert float(predicted) == pytest.approx(effect, abs=0.6 * 10.0 ** -len(predicted.split(".")[1]))


def test_actual_effects_are_means_over_runs_and_queries_with_their_standard_error(tmp_path: Path) -> None:
    result, truth = compared(SINGLES, runs=3)
    rows = reported(tmp_path, result, truth).table("source")
    for each in list_effects(truth):
        actual, error = rows[each.name][1].split(" ± ")
        assert float(actual.rstrip("~")) == pytest.approx(each.effect, abs=1e-3)
        assert float(error) == pytest.approx(each.error, abs=1e-3)
        assert actual.endswith("~") == (not each.distinguishable)


def test_removals_of_sets_have_a_table_of_their_own(tmp_path: Path) -> None:
    result, truth = compared(PAIRS)
    page = reported(tmp_path, result, truth)
    removals, sources = page.table("removed"), page.table("source")
    assert sorted(removals) == sorted(
        ["times + post", "post + wire", "wire + blog", "blog + log", "times + log", "wire"]
    )
    assert float(removals["blog + log"][1].split(" ± ")[0].rstrip("~")) == pytest.approx(
        float(truth.effects[:, :, 3].mean()), abs=1e-3
    )
    assert sources["blog"][1] == "not removed alone"
    assert sources["wire"][1] == removals["wire"][1]


def test_halves_say_that_no_source_was_removed_by_itself(tmp_path: Path) -> None:
    page = reported(tmp_path, *compared(HALVES))
    assert "No source was removed by itself" in page.text
    assert page.table("source")["blog"][-1] in ("helps", "harms") and len(page.table("source")["blog"]) == 3


@every_kind
def test_figures_are_those_of_evaluate(tmp_path: Path, subsets: Subsets) -> None:
    result, truth = compared(subsets)
    rows = reported(tmp_path, result, truth).table("")
    metrics = evaluate(result, truth)
    assert list(rows) == [metric.name for metric in metrics]
    for metric in metrics:
        assert rows[metric.name][0] == metric.estimate.format(3)
        limits = ["–" if limit != limit else f"{limit:.3f}" for limit in (metric.ceiling, metric.single_run)]
        assert rows[metric.name][-2:] == limits


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("this_run", "if a source had had weight 0 in the very training run that made this model"),
        ("expected", "if a source were left out, on average over training runs like this one"),
    ],
)
def test_the_question_is_asked_in_words(tmp_path: Path, question: Any, words: str) -> None:
    result, truth = compared(question=question)
    page = reported(tmp_path, result, replace(truth, question=question))
    assert f"How would the loss of these 24 queries change {words}" in page.text


@every_kind
def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path, subsets: Subsets) -> None:
    page = reported(tmp_path, *compared(subsets))
    assert page.addresses == {"#plot"}  # a part of the page itself
    assert not page.named("script") and "http" not in page.source.replace("http-equiv", "")
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "default-src 'none'" in page.source
    assert "prefers-color-scheme: dark" in page.source
    assert "width=device-width" in page.source


def test_owners_are_shown_and_only_addresses_of_the_web_are_linked(tmp_path: Path) -> None:
    result, truth = compared(SINGLES)
    about = [About("Ann & co", "https://x.example/?a&b", "https://ann.example"), About("<b>", "javascript:x"), About()]
    described = replace(result, labels=replace(result.labels, source_about=(*about, *about[2:] * 2)))
    page, plain = reported(tmp_path, described, truth), reported(tmp_path, result, truth)
    rows = page.table("source")
    assert rows["times"][-3:-1] == ["Ann & co", "https://x.example/?a&b"] and rows["post"][-3:-1] == [
        "<b>",
        "javascript:x",
    ]
    assert page.addresses == {"#plot", "https://ann.example", "https://x.example/?a&b"}
    assert all(link["rel"] == "noopener noreferrer nofollow" for link in page.named("a"))
    assert "owner" not in plain.text and len(plain.table("source")["times"]) == len(rows["times"]) - 2


HOSTILE = "<script>alert(1)</script>\"'\x1b[2J"


def test_names_are_shown_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    names = dict(enumerate([HOSTILE, "<b>", "{{ 1 }}", "&amp;", "]]>"]))
    sources = Sources.by_label([i % 5 for i in range(N)], names=names)
    subsets = Subsets.without_each(sources)
    result, truth = compared(subsets, measure="<i>loss</i>", warnings=("<u>beware</u>",))
    truth = replace(truth, measure="<i>loss</i>")
    texts = ["<script>alert(2)</script>\nsecond line"] * 24
    page = reported(
        tmp_path,
        result,
        truth,
        illustrations=Illustrations(texts=texts, labels=["<em>label</em>"] * 24),
        preface=Preface(title="<s>title</s>", lead="<s>lead</s>", command="imprint <s>evaluate</s>"),
    )
    assert not {"script", "u", "em", "s"} & {name for name, _ in page.tags}
    shown = ["<script>alert(1)</script>\"'\\x1b[2J", "{{ 1 }}", "&amp;", "<u>beware</u>", "<i>loss</i>", "<s>title</s>"]
    shown += ["<script>alert(2)</script>", "second line", "<em>label</em>", "imprint <s>evaluate</s>"]
    assert [text for text in shown if text not in page.text] == []


def test_a_guess_by_size_stands_beside_the_scores(tmp_path: Path) -> None:
    sources = Sources.groups({"small": range(2), "middle": range(2, 8), "large": range(8, 20)})
    subsets = Subsets.without_each(sources, n=N)
    page = reported(tmp_path, *compared(subsets))
    scores = -torch.tensor(sources.sizes, dtype=torch.float64).repeat(24, 1)
    guessed = evaluate(scores, compared(subsets)[1])[0]
    assert page.table("")["correlation of removals, mean over queries"][1] == guessed.estimate.format(3)
    rows = page.table("source")
    small, large = (float(rows[name][2]) for name in ("small", "large"))
    assert large == pytest.approx(6 * small, rel=0.05)


def test_a_guess_by_common_words_stands_there_where_texts_are_known(tmp_path: Path) -> None:
    words = ["apple pear", "ship sea", "king court", "tide bay", "hall mayor"]
    examples = [words[i % 5] for i in range(N)]
    queries = [words[i % 5] for i in range(24)]
    page = reported(tmp_path, *compared(), illustrations=Illustrations(texts=queries, example_texts=examples))
    assert "a guess by common words (TF-IDF) reaches" in page.text
    assert len(page.table("source")["blog"]) == 6  # predicted, actual, both guesses, examples, what it does
    without = reported(tmp_path, *compared(), illustrations=Illustrations(texts=queries))
    assert "TF-IDF" not in without.text


def test_a_guess_by_words_is_left_out_where_its_table_would_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.evaluation.reports.guesses._LARGEST", 10)
    given = Illustrations(texts=["one two"] * 24, example_texts=["one two"] * N)
    assert "TF-IDF" not in reported(tmp_path, *compared(), illustrations=given).text


def test_predictions_have_their_error_and_those_within_it_are_marked(tmp_path: Path) -> None:
    result, truth = compared(question="this_run", removes=True)
    truth = replace(truth, question="this_run")
    loud = replace(result, noise_changes=torch.full((2, 24), 0.5, dtype=torch.float64))
    page = reported(tmp_path, loud, truth)
    for row in page.table("source").values():
        predicted, error = row[0].split(" ± ")
        assert predicted.endswith("~")
        assert float(error) == pytest.approx(float(loud.mean().standard_error[0, 0]), abs=1e-2)  # type: ignore[index]
    assert "~ after a predicted effect: not distinguishable from 0" in page.text
    assert "± of predicted effects is the standard error by chance alone" in page.text
    quiet = reported(tmp_path, result, truth)
    assert "after a predicted effect" not in quiet.text and "± of predicted" not in quiet.text


def test_measures_where_more_is_better_turn_help_and_harm_around(tmp_path: Path) -> None:
    result, truth = compared(better="higher")
    rows = reported(tmp_path, result, truth).table("source")
    for row in rows.values():
        assert row[-1] == ("helps" if float(row[0]) < 0 else "harms")
    order = [float(row[0]) for row in rows.values()]
    assert order == sorted(order)
    neither = reported(tmp_path, *compared(better=None))
    assert "helps" not in neither.text and "harms" not in neither.text


def test_of_very_many_sources_the_table_shows_both_ends_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.evaluation.reports.page.LISTED", 6)
    result, truth = compared(EACH)
    page = reported(tmp_path, result, truth)
    effects = sorted(result.removal_effect.mean(0).tolist())
    shown = [float(row[0]) for row in page.table("source").values()]
    assert shown == pytest.approx([*effects[:-4:-1], *effects[2::-1]], abs=1e-2)
    assert "14 more with smaller effects are left out" in page.text


def test_how_it_was_made_is_said(tmp_path: Path) -> None:
    result, truth = compared(details={"readout": "jvp"}, fingerprints={"store": "ab" * 32})
    truth = replace(truth, about={"seed": 7, "created": "2026-01-02", "versions": {"torch": "9.9"}})
    page = reported(tmp_path, result, truth, preface=Preface(command="imprint evaluate runs/news truth/news"))
    for words in ("read out by jvp", "abababababababab", "seed 7", "2026-01-02", "torch 9.9"):
        assert words in page.text
    assert "imprint evaluate runs/news truth/news" in page.text


def test_the_page_is_replaced_whole_and_missing_folders_are_made(tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "report.html"
    result, truth = compared()
    write_report(result, truth, place, progress=False)
    before = place.read_text(encoding="utf-8")
    place.write_text("an earlier page")
    assert write_report(result, truth, place, progress=False) == place
    made = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
    assert made.sub("", place.read_text(encoding="utf-8")) == made.sub("", before)
    assert [path.name for path in place.parent.iterdir()] == ["report.html"]


def test_what_is_no_place_for_a_page_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    result, truth = compared()
    with pytest.raises(DataError, match=r"give a name that ends in \.html"):
        write_report(result, truth, tmp_path / "report.pdf")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(StoreError, match="is a folder: give the name of a file for the report"):
        write_report(result, truth, tmp_path / "folder.html")
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere.html")
    with pytest.raises(StoreError, match="it is a link"):
        write_report(result, truth, tmp_path / "link.html")


def test_a_failure_leaves_the_earlier_page(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.write_text("an earlier page")
    (other, _), (_, truth) = compared(EACH), compared(SINGLES)
    with pytest.raises(DataError, match="other sources"):
        write_report(other, truth, place, progress=False)
    assert place.read_text() == "an earlier page"


def test_scores_of_another_question_are_compared_only_if_asked_to(tmp_path: Path) -> None:
    result, truth = compared(question="this_run")
    with pytest.raises(DataError, match="across=True"):
        reported(tmp_path, result, truth)
    page = reported(tmp_path, result, truth, across=True)
    assert "Scores and ground truth answer different questions." in page.text


def test_too_few_removals_are_refused_as_by_evaluate(tmp_path: Path) -> None:
    few = Subsets.without(SINGLES.sources, [[], [0], [1]])
    with pytest.raises(DataError, match="a correlation needs at least 3"):
        reported(tmp_path, *compared(few))


@pytest.mark.parametrize("wrong", [(1, 0), (0, 0)])
def test_anything_but_an_attribution_and_a_truth_is_refused(tmp_path: Path, wrong: tuple[int, int]) -> None:
    both: Any = compared()
    with pytest.raises(DataError, match="a report is of an Attribution and a Truth, in this order; got"):
        write_report(both[wrong[0]], both[wrong[1]], tmp_path / "report.html")


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"the report needs .*imprint-attribution\[report\]"):
        write_report(*compared(), tmp_path / "report.html")


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    reported(tmp_path, *compared(), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_warnings_of_the_evaluation_are_on_the_page_and_not_repeated(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    overlapping = Sources.groups({"a": range(8), "b": range(4, 12), "c": range(10, 20), "d": range(3)})
    result, truth = compared(Subsets.without_each(overlapping, n=N))
    assert "the sources overlap" in reported(tmp_path, result, truth).text
    assert not recwarn.list


def test_constant_scores_are_called_undefined_and_break_nothing(tmp_path: Path) -> None:
    result, truth = compared()
    flat = attribution(torch.ones_like(result.scores), SINGLES)
    page = reported(tmp_path, flat, truth)
    assert "is undefined: scores or ground truth are constant" in page.text
    assert not re.search(r"\b(nan|None)\b", page.source)


def test_a_single_query_and_a_single_run_have_no_intervals(tmp_path: Path) -> None:
    result, truth = compared(runs=1)
    one = Truth(truth.subsets, truth.values[:, :, :1], "loss")
    page = reported(tmp_path, replace(result, scores=result.scores[:1], queries=(0,)), one)
    assert not re.search(r"\b(nan|None)\b", page.source)
    assert "how noisy actual effects are is unknown" in page.text
    assert " ± " not in page.table("source")["blog"][1]
