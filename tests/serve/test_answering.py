"""A query that leaves its answer open is answered by the model whose answer is attributed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient
from torch import nn

import imprint
from imprint.cli.commands.serving import _describe
from imprint.credit import verify
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import ADDRESS
from tests.serve.news import POLICY, News, make_ledger


def make_untrained(news: News) -> imprint.Task:
    """Return the task of the store as a file that was never trained would give it."""
    torch.manual_seed(99)
    return imprint.Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), form=news.task.form)


def test_answers_of_a_recorded_run_are_those_of_its_model_whatever_the_tasks_weights_are(
    news: News, tmp_path: Path
) -> None:
    untrained = make_untrained(news)
    queries = [news.ask(place, labelled=False) for place in range(12)]
    with torch.no_grad():
        likeliest = [str(int(each)) for each in news.task.model(news.inputs[:12]).argmax(1)]
        others = [str(int(each)) for each in untrained.model(news.inputs[:12]).argmax(1)]
    assert sum(one != other for one, other in zip(likeliest, others, strict=True)) >= 4
    found = []
    for name, task in (("trained", news.task), ("untrained", untrained)):
        with make_ledger(tmp_path / f"{name}.db") as ledger:
            service = Service(task, news.store, policy=POLICY, ledger=ledger)
            answered = asyncio.run(service.attribute(queries))
            credited = asyncio.run(service.credit(answered, caller="key:app", key="a"))
            assert verify(ledger, progress=False).holds
            found.append((answered, [entry.rows for entry in credited.receipt.entries]))
            service.close()
    (one, rows), (other, same) = found
    assert one.answers == other.answers == tuple(likeliest)
    assert torch.equal(one.result.scores, other.result.scores) and rows == same
    labels = one.result.labels
    assert labels.fingerprints == other.result.labels.fingerprints and labels.warnings == other.result.labels.warnings
    assert labels.validation == other.result.labels.validation and labels.details == other.result.labels.details


@pytest.fixture(params=["recorded_run", "task"])
def case(request: pytest.FixtureRequest, news: News, tmp_path: Path) -> tuple[str, Callable[[], Service]]:
    """Who answers, and a service in which they do."""
    task = make_untrained(news)
    if request.param == "recorded_run":
        return request.param, lambda: Service(task, news.store, settings=Settings(metrics=""))
    sources, plan = imprint.Sources.by_label([f"{place % 3}" for place in range(12)]), imprint.Plan(steps=2, lr=0.1)
    data = news.inputs[:12], news.labels[:12]
    store = imprint.simulate(task, data, sources, plan, out=tmp_path / "store", progress=False)
    assert store.question == "expected"
    return request.param, lambda: Service(task, store, settings=Settings(metrics=""))


def test_who_answers_is_announced_and_told(case: tuple[str, Callable[[], Service]], tmp_path: Path) -> None:
    expected, make = case
    service, access = make(), Access(tmp_path / "access.db")
    app = create_app(Settings(metrics=""), service, access)
    key = {"Authorization": f"Bearer {access.create('app', 'query').secret}"}
    with TestClient(app, base_url=ADDRESS) as client:
        assert client.get("/v1/store", headers=key).json()["answers_from"] == expected
        announced = dict(_describe(service, access, "http://127.0.0.1:8080", app))["answers"]
    access.close()
    assert {"recorded_run": "recorded run", "task": "task's own weights"}[expected] in announced
    assert ("must be those" in announced) == (expected == "task")


def test_answers_of_a_store_about_trainings_like_one_are_those_of_the_task(
    case: tuple[str, Callable[[], Service]], news: News
) -> None:
    expected, make = case
    service = make()
    model = service.task.model if expected == "task" else news.task.model
    with torch.no_grad():
        for parameter in service.task.model.parameters():
            parameter.mul_(-1)  # as somebody who trains on
        likeliest = model(news.inputs).argmax(1)
    found = asyncio.run(service.attribute([news.ask(place, labelled=False) for place in range(40)]))
    assert found.answers == tuple(map(str, likeliest.tolist()))
    service.close()
