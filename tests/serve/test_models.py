"""Models compute in any number type, and what they do wrong is neither blamed on callers nor told to them."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor, nn

import imprint
from imprint.errors import ConfigurationError
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import ADDRESS


class Touchy(nn.Module):
    """A linear model that fails on inputs above 100, and overflows on those above 10."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        largest = float(inputs.max())
        if largest > 100:
            raise RuntimeError("cannot open /srv/secret/weights.bin")
        found: Tensor = self.linear(inputs)
        return found * float("inf") if largest > 10 else found


def serve(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> Service:
    """Serve a classifier of two numbers that was simulated from six examples of three sources."""
    torch.manual_seed(0)
    data = torch.randn(6, 2, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    task = imprint.Task.classifier(model.to(dtype), form=imprint.NumbersForm((2,), classes=3, mean=0.1, scale=0.3))
    sources = imprint.Sources.by_label(["a", "a", "b", "b", "c", "c"])
    store = imprint.simulate(task, data, sources, imprint.Plan(steps=2, lr=0.1), out=folder / "store", progress=False)
    return Service(task, store)


class Wordy(nn.Module):
    """A model that returns more than its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, str]:
        return self.linear(inputs), "certainly"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (imprint.NumbersForm((2,), classes=2), r"has 2 classes, so .* shape \(1, 2\) .*; it returns \(1, 3\)"),
        (imprint.NumbersForm((2,), classes=("a", "b", "c", "d")), r"has 4 classes, .*; it returns \(1, 3\)"),
        (imprint.NumbersForm((2, 1), classes=3), r"fails on an input of shape \(1, 2, 1\) .*: RuntimeError: mat1"),
        (imprint.NumbersForm((5,), classes=3), r"fails on an input of shape \(1, 5\) .*: RuntimeError: mat1"),
    ],
)
def test_a_form_that_does_not_fit_the_model_is_refused_at_the_start(
    tmp_path: Path, form: imprint.NumbersForm, reason: str
) -> None:
    service = serve(nn.Linear(2, 3), tmp_path)
    service.close()
    with pytest.raises(ConfigurationError, match=reason) as refused:
        Service(service.task, service.store, form=form)
    assert "\n" not in str(refused.value)


def test_a_model_that_returns_more_than_a_tensor_is_refused_at_the_start(tmp_path: Path) -> None:
    model, data = Wordy(), (torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    form = imprint.NumbersForm((2,), classes=3)
    losses = nn.CrossEntropyLoss(reduction="none")
    task = imprint.Task(model, lambda model, batch: losses(model(batch[0])[0], batch[1]), form=form)
    sources, plan = imprint.Sources.by_label(list("aabbcc")), imprint.Plan(steps=2, lr=0.1)
    store = imprint.simulate(task, data, sources, plan, progress=False)
    with pytest.raises(ConfigurationError, match="this one returns a tuple"):
        Service(task, store)


@pytest.fixture
def touchy(tmp_path: Path) -> Iterator[Service]:
    made = serve(Touchy(), tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(touchy: Service, tmp_path: Path) -> Iterator[TestClient]:
    access = Access(tmp_path / "access.db")
    app = create_app(Settings(metrics=""), touchy, access)
    secret = access.create("app", "query").secret
    with TestClient(app, base_url=ADDRESS, headers={"Authorization": f"Bearer {secret}"}) as made:
        yield made
    access.close()


def ask(client: TestClient, *values: float, **more: Any) -> tuple[int, str]:
    answer = client.post("/v1/attributions", json={"query": {"values": list(values), **more}})
    return answer.status_code, answer.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inputs_have_the_number_type_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    service = serve(nn.Linear(2, 3), tmp_path, dtype)
    for query in ({"values": [0.1, 1 / 3]}, {"values": [0.1, 1 / 3], "label": 1}):
        found = asyncio.run(service.attribute([query]))
        inputs, label = found.batches[0]
        expected = ((torch.tensor([[0.1, 1 / 3]], dtype=torch.float64) - 0.1) / 0.3).to(dtype)
        assert torch.equal(inputs, expected)
        scores = imprint.attribute(service.task, service.store, (expected, label), progress=False).scores
        assert torch.equal(found.result.scores, scores)
    service.close()


@pytest.mark.parametrize("more", [{}, {"label": 1}])
@pytest.mark.parametrize("first", [[], [0.5, 0.5]])
def test_a_model_that_fails_is_an_error_of_the_service_without_its_words(
    client: TestClient, caplog: pytest.LogCaptureFixture, more: dict[str, int], first: list[float]
) -> None:
    if first:
        assert ask(client, *first)[0] == 200
    with caplog.at_level(logging.ERROR, logger="imprint.serve"):
        status, text = ask(client, 1000.0, 0.0, **more)
    assert status == 500 and "secret" not in text and "RuntimeError" not in text
    assert "Error while answering /v1/attributions" in caplog.text
    assert ask(client, 0.5, 0.5)[0] == 200


@pytest.mark.parametrize("first", [[], [0.5, 0.5]])
def test_a_query_without_a_finite_score_is_refused_without_internals(client: TestClient, first: list[float]) -> None:
    if first:
        assert ask(client, *first)[0] == 200
    status, text = ask(client, 10.0, 0.0, label=1)
    assert status == 422 and '"no_number"' in text and "no finite number" in text
    assert "source" not in text and " nan" not in text


def test_an_example_that_the_model_cannot_read_ends_no_start(
    touchy: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imprint.NumbersForm, "example", {"values": [1000.0, 0.0]})
    touchy.warm_up()
    assert "the example of the task's form cannot be read: RuntimeError" in caplog.text
