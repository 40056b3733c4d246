"""The result: signs, units, tables, pictures and files."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from safetensors.torch import save_file
from torch import nn

from imprint import Attribution, MissingExtra, Plan, ReadoutError, Sources, StoreError, Task, attribute, simulate
from imprint.attribution.labels import Labels
from imprint.attribution.top import Order
from imprint.attribution.uncertainty import LACKING
from imprint.data import Data
from imprint.store.fingerprint import of_batches, of_data, of_sources, probe_measures
from imprint.store.request import describe

SCORES = torch.tensor([[3.0, -6.0, 0.5], [-1.0, 2.0, 8.0]], dtype=torch.float64)


def _labels(better: Any = "lower", **changes: Any) -> Labels:
    fields: dict[str, Any] = {
        "n": 10,
        "source_ids": ("ann", "bob", "cid"),
        "source_names": ("Ann", "Bob <b>", "Cid"),
        "source_sizes": (4, 5, 1),
        "measure": "loss",
        "better": better,
        "details": {"readout": "central", "central_step": 0.01},
    }
    return Labels(**{**fields, **changes})


def _attribution(better: Any = "lower") -> Attribution:
    return Attribution(_labels(better), SCORES)


# --- sign and units


def test_a_removal_is_minus_the_score_over_n() -> None:
    torch.testing.assert_close(_attribution().removal_effect, -SCORES / 10)


def test_removing_a_source_that_fits_the_query_raises_its_loss() -> None:
    """End to end: the sources pull towards class 0 and class 1, the queries belong to one each."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 2).abs(), torch.arange(20) % 2
    task = Task.classifier(nn.Linear(2, 2))
    store = simulate(task, (x, y), Sources.by_label(y), Plan(steps=5, lr=0.1), progress=False)
    queries = torch.ones(2, 2), torch.tensor([0, 1])
    effect = attribute(task, store, queries, progress=False).removal_effect
    assert bool((effect.diagonal() > 0).all())
    assert effect[0, 1] < 0 and effect[1, 0] < 0
    confident = Task.classifier(task.model, measure="margin")
    margins = attribute(confident, store, queries, progress=False).removal_effect
    assert torch.equal(margins.sign(), -effect.sign())


@pytest.mark.parametrize(
    ("better", "meaning"), [("lower", "+ means the source helps"), ("higher", "− means the source helps"), (None, "")]
)
def test_the_unit_says_what_the_sign_means(better: Any, meaning: str) -> None:
    unit = _labels(better).unit
    assert unit.startswith("change of loss if the source were removed")
    assert unit.endswith(meaning)
    assert ("helps" in unit) == (better is not None)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_labels_are_those_of_task_and_store() -> None:
    torch.manual_seed(0)
    task = Task.classifier(nn.Linear(2, 2), measure="margin")
    sources = Sources.groups({"a": [0, 1], "b": [1]}, names={"b": "Bee"})
    data = torch.randn(4, 2), torch.arange(4) % 2
    store = simulate(task, data, sources, Plan(steps=2, lr=0.1), progress=False)
    queries = torch.randn(3, 2), torch.tensor([0, 1, 0])
    labels = attribute(task, store, queries, batch_size=2, progress=False).labels
    prints = {
        "store": _sha256(store.path / "manifest.json"),
        "model": hashlib.sha256(_sha256(store.path / "checkpoint-000" / "base.safetensors").encode()).hexdigest(),
        "data": of_data(Data(data, device=torch.device("cpu"))),
        "sources": of_sources(sources),
        "plan": Plan(steps=2, lr=0.1).to_json(),
        "parameters": describe(task),
        "queries": of_batches([(3, queries)]),
        "measures": probe_measures(task, [(3, queries)]),
    }
    details = {
        "readout": "jvp",
        "examples_of_several_sources": 1,
        "error": f"standard errors {LACKING['expected']}",
    }
    assert labels == Labels(4, ("a", "b"), ("a", "Bee"), (2, 1), "margin", "higher", details, prints)


# --- top


def test_top_by_magnitude_raises_and_lowers() -> None:
    result = _attribution()
    ids: dict[Order, list[list[str]]] = {
        "magnitude": [["bob", "ann"], ["cid", "bob"]],
        "raises": [["bob", "cid"], ["ann", "bob"]],
        "lowers": [["ann", "cid"], ["cid", "bob"]],
    }
    for by, expected in ids.items():
        assert [[credit.source for credit in credits] for credits in result.top(2, by=by)] == expected


def test_a_credit_has_the_source_its_score_and_its_effect() -> None:
    (credit, *_) = _attribution().top(1)[0]
    assert tuple(credit) == (0, "bob", "Bob <b>", -6.0, 0.6, "expected", None, False, None, "", "", "")
    assert (credit.query, credit.source, credit.name) == (0, "bob", "Bob <b>")
    assert credit.removal_effect == -credit.score / 10


def test_top_has_no_more_than_there_is() -> None:
    top = _attribution().top(99)
    assert top.indices.shape == (2, 3)
    assert len(top) == 2


def test_a_query_can_be_counted_from_the_end() -> None:
    top = _attribution().top(2)
    assert top[-1] == top[1]
    assert top[-1][0].query == 1
    with pytest.raises(IndexError):
        top[2]


@given(
    st.lists(st.lists(st.integers(-50, 50), min_size=4, max_size=4, unique_by=abs), min_size=1, max_size=5), st.data()
)
def test_top_is_a_sorted_prefix(rows: list[list[int]], data: st.DataObject) -> None:
    orders: list[Order] = ["magnitude", "raises", "lowers"]
    k, by = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(orders))
    labels = _labels(source_ids=tuple("abcd"), source_names=tuple("abcd"), source_sizes=(1, 1, 1, 1))
    top = Attribution(labels, torch.tensor(rows, dtype=torch.float64)).top(k, by=by)
    key = {"magnitude": lambda s: -abs(s), "raises": lambda s: s, "lowers": lambda s: -s}[by]
    for row, credits in zip(rows, top, strict=True):
        assert [credit.score for credit in credits] == sorted(map(float, row), key=key)[:k]


def test_some_of_the_queries_can_be_taken() -> None:
    result = _attribution()
    assert torch.equal(result[1:].scores, SCORES[1:])
    assert torch.equal(result[[1, 0]].scores, SCORES[[1, 0]])
    assert torch.equal(result[torch.tensor([False, True])].scores, SCORES[1:])
    assert result[:1].labels.source_ids == result.labels.source_ids
    assert (len(result), len(result[:1])) == (2, 1)


# --- shown


def test_the_text_shows_effects_with_their_unit() -> None:
    shown = repr(_attribution())
    assert "2 queries × 3 sources, largest effects of either sign first\n" in shown
    assert "change of loss if the source were removed: + means the source helps" in shown
    assert "query 0: Bob <b> +0.6, Ann -0.3, Cid -0.05" in shown


def test_queries_that_came_with_texts_are_named_by_them(tmp_path: Path) -> None:
    long = "what is <this>, " * 9
    named = Attribution(_labels(query_texts=("who?", long)), SCORES)
    for result in (named, named[[1, 0]], named - named, named.top(2)):
        assert "\n  query 0 (who?): " in repr(result) and long not in repr(result)
        assert "\n  query 1 (what is <this>, what is …" in repr(result)
    assert "query 1 (what is &lt;this&gt;, what" in named._repr_html_()
    assert named[1:].plot(1).get_title().startswith("query 1 (what is <this>") and "who" not in repr(named[1:])
    assert "who" not in repr(named.mean())
    named.save(tmp_path / "named.safetensors")
    assert b"who?" not in (tmp_path / "named.safetensors").read_bytes()
    assert Attribution.load(tmp_path / "named.safetensors").labels == _labels()


def test_the_text_of_many_queries_is_short() -> None:
    many = Attribution(_labels(), SCORES.repeat(50, 1))
    assert "100 queries" in repr(many)
    for text in (repr(many), repr(many.top(2))):
        assert text.endswith("\n  … and 95 more queries: to_pandas() has all of them")
    assert "90 more queries: to_pandas() has all of them" in many._repr_html_()
    assert len(repr(many).splitlines()) <= 11
    assert len(repr(many.top(2)).splitlines()) < 10


def test_the_page_escapes_names_and_shows_ten_queries() -> None:
    many = Attribution(_labels(), SCORES.repeat(6, 1))
    page = many._repr_html_()
    assert "Bob &lt;b&gt;" in page and "Bob <b>" not in page
    assert page.count("<tr>") == 10
    assert "2 more queries" in page
    assert "+0.6" in page
    assert "change of loss" in page
    assert "more queries" not in _attribution()._repr_html_()


def test_a_table_has_queries_as_rows_and_sources_as_columns() -> None:
    frame = _attribution().to_pandas()
    assert list(frame.columns) == ["ann", "bob", "cid"]
    assert (frame.index.name, frame.columns.name) == ("query", "source, expected")
    assert frame.loc[0, "bob"] == 0.6
    assert _attribution().to_pandas("scores").loc[1, "cid"] == 8.0


def test_a_table_of_the_top_has_a_row_for_each_credit() -> None:
    frame = _attribution().top(2).to_pandas()
    more = ["question", "distinguishable", "estimate", "standard_error"]
    assert list(frame.columns) == ["query", "source", "name", "score", "removal_effect", *more]
    assert frame["query"].tolist() == [0, 0, 1, 1]
    assert frame["source"].tolist() == ["bob", "ann", "cid", "bob"]
    assert frame["removal_effect"].tolist() == [0.6, -0.3, -0.8, -0.2]


def test_a_table_belongs_to_its_owner() -> None:
    result = Attribution(_labels(), SCORES.clone())
    frame = result.to_pandas("scores")
    frame.loc[0, "ann"] = 99.0
    assert torch.equal(result.scores, SCORES)


def _bars(axes: Any) -> dict[str, float]:
    names = [label.get_text() for label in axes.get_yticklabels()]
    return dict(zip(names, (bar.get_width() for bar in axes.patches), strict=True))


def test_a_plot_has_the_effects_of_one_query_as_bars() -> None:
    axes = _attribution().plot(query=1)
    assert _bars(axes) == pytest.approx({"Ann": 0.1, "Bob <b>": -0.2, "Cid": -0.8})
    assert axes.get_xlabel() == f"{_labels().unit}\n{_labels().meaning}"
    assert axes.get_title() == "query 1"


def test_a_plot_without_a_query_has_the_mean() -> None:
    axes = _attribution().plot()
    assert _bars(axes) == pytest.approx({"Ann": -0.1, "Bob <b>": 0.2, "Cid": -0.425})
    assert "mean" in axes.get_title()


def test_a_plot_has_the_largest_on_top_and_no_more_than_asked_for() -> None:
    bars = _bars(_attribution().plot(query=0, k=2))
    assert list(bars) == ["Ann", "Bob <b>"]


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_bars_of_helpful_sources_have_one_colour(better: Any) -> None:
    axes = _attribution(better).plot(query=0)
    colours = {name: bar.get_facecolor() for name, bar in zip(_bars(axes), axes.patches, strict=True)}
    assert colours["Ann"] == colours["Cid"] != colours["Bob <b>"]
    other = _attribution("higher" if better == "lower" else "lower").plot(query=0)
    swapped = {name: bar.get_facecolor() for name, bar in zip(_bars(other), other.patches, strict=True)}
    assert swapped["Ann"] == colours["Bob <b>"]


def test_sources_with_one_name_keep_their_own_bars() -> None:
    labels = _labels(source_names=("same", "same", "other"))
    assert len(Attribution(labels, SCORES).plot(query=0).get_yticklabels()) == 3


def test_a_plot_goes_into_given_axes() -> None:
    axes = plt.subplots()[1]
    assert _attribution().plot(ax=axes) is axes


@pytest.mark.parametrize(("missing", "call"), [("pandas", "to_pandas"), ("matplotlib", "plot")])
def test_a_missing_library_names_the_extra_to_install(missing: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.pyplot", None)
    with pytest.raises(MissingExtra, match=r'pip install "imprint-attribution\[report\]"'):
        getattr(_attribution(), call)()


# --- kept


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    prints = {"data": "d", "parameters": {"weight": {"shape": [2, 3], "dtype": "torch.float32"}}}
    result = Attribution(_labels(fingerprints=prints), SCORES)
    result.save(tmp_path / "scores.safetensors")
    loaded = Attribution.load(tmp_path / "scores.safetensors")
    assert loaded.labels == result.labels
    assert torch.equal(loaded.scores, result.scores)
    assert repr(loaded) == repr(result)


def test_some_queries_of_a_result_can_be_saved(tmp_path: Path) -> None:
    part = Attribution(_labels(), SCORES.T.contiguous().T)[1:]
    part.save(tmp_path / "part.safetensors")
    assert torch.equal(Attribution.load(tmp_path / "part.safetensors").scores, SCORES[1:])


@pytest.mark.parametrize("content", [b"", b"not tensors at all", None], ids=["empty", "garbage", "absent"])
def test_a_file_that_is_no_attribution_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(StoreError, match="file is not a saved attribution"):
        Attribution.load(tmp_path / "file")


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    save_file({"scores": SCORES}, tmp_path / "file")
    with pytest.raises(StoreError, match="not a saved attribution"):
        Attribution.load(tmp_path / "file")
    save_file({"scores": SCORES}, tmp_path / "file", {"imprint": '{"surprise": 1}'})
    with pytest.raises(StoreError, match="not a saved attribution"):
        Attribution.load(tmp_path / "file")


def test_a_result_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absent"):
        _attribution().save(tmp_path / "absent" / "deeper" / "scores.safetensors")


def test_the_mean_over_queries_is_an_attribution_of_one() -> None:
    whole = _attribution()
    mean = whole.mean()
    assert mean.scores.shape == (1, whole.scores.shape[1]) and mean.labels.source_ids == whole.labels.source_ids
    torch.testing.assert_close(mean.removal_effect[0], whole.removal_effect.mean(0))


def test_the_mean_is_not_taken_for_a_query(tmp_path: Path) -> None:
    mean = _attribution().mean()
    mean.save(tmp_path / "mean.safetensors")
    for each in (mean, Attribution.load(tmp_path / "mean.safetensors"), mean[0], mean.mean()):
        assert each.queries == ("mean",)
        assert each.top(1)[0][0].query == "mean"
        assert each.top(1).to_json()["queries"][0][0]["query"] == "mean"
        assert "\n  mean over queries: " in repr(each) and "query 0" not in repr(each)
        assert "query 0" not in each._repr_html_()
        assert each.to_pandas().index.tolist() == each.top(1).to_pandas()["query"].tolist() == ["mean"]
        assert each.plot().get_title() == "mean over queries"


def test_only_all_queries_in_their_order_keep_their_fingerprint() -> None:
    prints = {"sources": "s", "queries": "q"}
    result = Attribution(_labels(fingerprints=prints), SCORES)
    for whole in (result, result[:], result[[0, 1]]):
        assert whole.labels.fingerprints == prints
    for part in (result[:1], result[[1, 0]], result[[0, 0]], result[1], result.mean()):
        assert part.labels.fingerprints == {"sources": "s"}
    assert result.labels.fingerprints == prints


def test_a_file_of_an_earlier_version_has_no_fingerprints(tmp_path: Path) -> None:
    labels = {name: value for name, value in _labels().to_json().items() if name != "fingerprints"}
    metadata = {"imprint": json.dumps({"labels": labels, "queries": [0, 1]})}
    save_file({"scores": SCORES}, tmp_path / "old.safetensors", metadata)
    loaded = Attribution.load(tmp_path / "old.safetensors")
    assert loaded.labels == _labels() and loaded.labels.fingerprints == {}


def test_only_a_truth_can_calibrate() -> None:
    with pytest.raises(ReadoutError, match=r"calibrate needs a Truth, got a str: Truth\.load"):
        _attribution().calibrate("truth/news")  # type: ignore[arg-type]


def test_the_text_begins_with_the_mean() -> None:
    whole = _attribution()
    _, second, *_ = repr(whole).splitlines()
    first = whole.mean().top(1)[0][0]
    assert second.startswith(f"  mean over queries: {first.name} {first.removal_effect:+.3g}, ")
