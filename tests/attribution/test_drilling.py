"""Looking inside a source: its documents are sources of their own, and add up to it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import (
    DataError,
    Plan,
    RunRecorder,
    Sources,
    SourcesError,
    StoreError,
    Task,
    attribute,
    drill_down,
    simulate,
)

N = 24
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 2
OWNERS = ["times", "post", "times", "blog"] * 6
DOCUMENTS = [f"day {index // 8}" for index in range(N)]
QUERIES = (X[:4] + 0.1, Y[:4])
SPECTRAL = Plan(engine="spectral", damping=0.1)


def make_task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Linear(3, 2).double())


def look(**more: Any) -> Any:
    given = {"plan": SPECTRAL, "documents": DOCUMENTS, "progress": False, **more}
    return drill_down(make_task(), (X, Y), Sources.by_label(OWNERS), "times", QUERIES, **given)


@pytest.mark.parametrize("plan", [SPECTRAL, Plan(steps=5, lr=0.1)])
def test_the_documents_of_a_source_add_up_to_it(plan: Plan) -> None:
    task, sources = make_task(), Sources.by_label(OWNERS)
    whole = attribute(task, simulate(task, (X, Y), sources, plan, progress=False), QUERIES, progress=False)
    found = look(plan=plan)
    assert found.source == "times" and found.result.labels.source_ids == ("day 0", "day 1", "day 2")
    assert found.result.labels.source_sizes == (4, 4, 4) and found.result.question == "expected"
    column = whole.labels.source_ids.index("times")
    torch.testing.assert_close(found.result.scores.sum(1), whole.scores[:, column], rtol=1e-9, atol=1e-12)


def test_without_a_plan_single_examples_are_estimated_as_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    found = look(plan=None, documents=None)
    task = make_task()
    plan = Plan.auto(task, (X, Y), Sources.per_example(N), progress=False)
    each = attribute(
        task, simulate(task, (X, Y), Sources.per_example(N), plan, progress=False), QUERIES, progress=False
    )
    members = [int(name) for name in found.result.labels.source_ids]
    assert members == [index for index in range(N) if OWNERS[index] == "times"]
    torch.testing.assert_close(found.result.scores, each.scores[:, members], rtol=1e-6, atol=1e-9)


def test_with_a_recorded_run_each_document_is_really_left_out(tmp_path: Path) -> None:
    task = make_task()
    optimiser = torch.optim.SGD(task.model.parameters(), lr=0.2)
    start = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    run, order = RunRecorder(tmp_path / "run", task.model, optimiser), []
    for indices in run.batches(N, 8, epochs=2):
        order.append(torch.as_tensor(indices))
        with run.step(indices) as step:
            optimiser.zero_grad()
            step.backward(F.cross_entropy(task.model(X[indices]), Y[indices]))
            optimiser.step()
    given: Any = {"documents": DOCUMENTS, "run": run.finish(), "progress": False}
    found = drill_down(task, (X, Y), Sources.by_label(OWNERS), "times", QUERIES, **given)
    assert found.result.question == "this_run"
    kept = torch.tensor([OWNERS[i] != "times" or DOCUMENTS[i] != "day 1" for i in range(N)])
    without, end = (_train(start, order, weights) for weights in (kept.double(), torch.ones(N).double()))
    actual = F.cross_entropy(without(QUERIES[0]), QUERIES[1], reduction="none") - F.cross_entropy(
        end(QUERIES[0]), QUERIES[1], reduction="none"
    )
    torch.testing.assert_close(found.result.removal_effect[:, 1], actual.detach(), rtol=1e-8, atol=1e-11)


def _train(start: dict[str, Tensor], order: list[Tensor], weights: Tensor) -> nn.Module:
    model = nn.Linear(3, 2).double()
    model.load_state_dict(start)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for indices in order:
        optimiser.zero_grad()
        losses = F.cross_entropy(model(X[indices]), Y[indices], reduction="none")
        ((weights[indices] * losses).sum() / len(indices)).backward()
        optimiser.step()
    return model


def test_what_is_kept_is_only_read_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = look(out=tmp_path / "inside")
    again = look(out=tmp_path / "inside")
    assert torch.equal(first.result.scores, again.result.scores)
    with pytest.raises(Exception, match="already holds a store, made otherwise"):
        look(out=tmp_path / "inside", documents=None)


def test_texts_of_examples_are_joined_and_shown_beside_their_document() -> None:
    texts, asked = [f"text <{index}>" for index in range(N)], ["first?", "second?", "third?", "<b>fourth</b>\x1b[2J"]
    found = look(texts=texts, asked=asked)
    (best, text), *_ = found.top(1, query=3)
    members = [index for index in range(N) if OWNERS[index] == "times" and DOCUMENTS[index] == best.source]
    assert text == " ".join(texts[index] for index in members)
    assert "Inside times: 3 documents" in repr(found) and "first?" in repr(found) and "text <" in repr(found)
    page = found.to_html()
    assert page.count("<section>") == 4 and "&lt;b&gt;fourth" in page and "\x1b" not in page and "text &lt;" in page
    assert "expected: mean over trainings like this one" in page and "not validated" in page


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SourcesError, match="there is no source 'time'; did you mean times"):
        drill_down(make_task(), (X, Y), Sources.by_label(OWNERS), "time", QUERIES)
    with pytest.raises(SourcesError, match="expected the document of each of 24 training examples, got 3"):
        look(documents=["a", "b", "c"])
    with pytest.raises(DataError, match="there are 2 texts, and 24 training examples"):
        look(texts=["a", "b"])
    with pytest.raises(DataError, match="there are 1 texts of queries, and 4 queries"):
        look(asked=["a"])


def test_documents_may_be_numbered_by_an_array() -> None:
    sources = Sources.by_label(OWNERS)
    numbered: tuple[Any, ...] = (np.arange(N) // 8, torch.arange(N) // 8)
    for labels in numbered:
        assert sources.inside("times", labels, N).ids == ("0", "1", "2")


def test_a_store_is_looked_into_only_with_what_it_was_made_from(tmp_path: Path) -> None:
    task, sources = make_task(), Sources.by_label(OWNERS)
    early = [{name: 0.5 * tensor for name, tensor in task.state().items()}]
    store = simulate(task, (X, Y), sources, SPECTRAL, checkpoints=early, progress=False)
    given: Any = {"plan": SPECTRAL, "documents": DOCUMENTS, "store": store, "progress": False}
    found = drill_down(task, (X, Y), sources, "times", QUERIES, checkpoints=early, **given)
    assert found.result.warnings == ()
    with pytest.raises(StoreError, match="these are not the checkpoints"):
        drill_down(task, (X, Y), sources, "times", QUERIES, **given)
    with pytest.raises(SourcesError, match="these are not the sources"):
        drill_down(
            task, (X, Y), Sources.by_label(["times", *OWNERS[:-1]]), "times", QUERIES, checkpoints=early, **given
        )
    with pytest.raises(DataError, match="this is not the training data"):
        drill_down(task, (X + 1, Y), sources, "times", QUERIES, checkpoints=early, **given)


def test_what_is_kept_is_read_without_choosing_a_plan_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = look(plan=None, out=tmp_path / "inside")

    def refuse(*given: Any, **more: Any) -> Plan:
        raise AssertionError("a plan was chosen again")

    monkeypatch.setattr(Plan, "auto", refuse)
    assert torch.equal(look(plan=None, out=tmp_path / "inside").result.scores, first.result.scores)


def test_no_documents_are_not_all_documents() -> None:
    with pytest.raises(SourcesError, match="expected the document of each of 24 training examples, got 0"):
        look(documents=[])


def test_a_question_is_shown_as_it_was_asked() -> None:
    assert "query 0: what is this:" in repr(look(asked=["what is this:"] * 4))
