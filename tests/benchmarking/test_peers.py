"""The field's methods run on a small benchmark, and their scores have our orientation."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import DataError, MissingExtra
from imprint.benchmarking.bench import Bench
from imprint.benchmarking.comparison import MethodScores
from imprint.data import Data
from tests.benches import little_digits, toy

pytest.importorskip("dattri", reason="dattri is not installed: the extra `bench` has it")

from imprint.benchmarking import peers as module
from imprint.benchmarking.peers import peers

NAMES = (
    *("TRAK-1", "TRAK-10", "TRAK-50", "IF explicit", "IF-CG", "IF-LiSSA", "IF-Arnoldi", "DataInf"),
    *("EK-FAC (dattri)", "TracIn", "Grad-Dot", "Grad-Cos", "RPS"),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(little_digits(), tmp_path_factory.mktemp("digits"), progress=False)


@pytest.fixture(scope="module")
def convex(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    protocol = toy(halves=30)
    x, y = protocol.train.examples.gather(torch.arange(40))
    train = replace(protocol.train, data=(x.float(), y), build=lambda: nn.Sequential(nn.Linear(4, 3)))
    queries = (protocol.queries[0].float(), protocol.queries[1])
    return Bench(replace(protocol, train=train, queries=queries), tmp_path_factory.mktemp("convex"), progress=False)


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DAMPINGS", (0.1, 0.01))
    monkeypatch.setattr(module, "STRENGTHS", (0.1,))


def test_they_are_known_by_name(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(peers(small)) == NAMES
    monkeypatch.setattr(module, "_EXPLICIT", 100)
    assert "IF explicit" not in peers(small)  # the Hessian would be too large


@pytest.mark.parametrize("name", NAMES)
def test_each_scores_every_example(name: str, small: Bench) -> None:
    found = small.score(peers(small)[name], 0)
    assert found.scores.shape == (10, 60)
    if name == "IF-Arnoldi" and found.note == "not finite":  # where the Hessian has too few positive eigenvalues
        assert not found.scores.any()
        return
    assert found.scores.isfinite().all() and (found.scores.std(dim=1) > 0).all()
    once = name in ("TracIn", "Grad-Dot", "Grad-Cos")  # nothing is prepared
    assert (found.prepare == 0) == once and 0 < found.query < 60
    assert found.peak_bytes is not None and found.peak_bytes > 60 * 10 * 4


@pytest.mark.parametrize(("name", "size"), [("TRAK-10", "TRAK_BATCH"), ("IF-CG", "CG_BATCH"), ("DataInf", "_DATAINF")])
def test_scores_do_not_depend_on_batches(name: str, size: str, small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small.score(peers(small)[name], 0).scores
    monkeypatch.setattr(module, size, 7)
    asked: list[int | None] = []
    made = module.make_loader

    def told(columns: Any, size: int | None = None) -> Any:
        asked.append(size)
        return made(columns, size)

    monkeypatch.setattr(module, "make_loader", told)
    batched = small.score(peers(small)[name], 0).scores
    assert 7 in asked
    torch.testing.assert_close(batched, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_every_method_is_known_by_what_its_scores_depend_on(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: method.key_text() for name, method in peers(small).items()}
    monkeypatch.setattr(module, "DAMPINGS", (0.1, 0.02))
    after = {name: method.key_text() for name, method in peers(small).items()}
    assert {name for name in NAMES if before[name] != after[name]} == {
        *("IF explicit", "IF-CG", "IF-Arnoldi", "DataInf", "EK-FAC (dattri)"),
    }
    assert len({before[name] for name in ("TRAK-1", "TRAK-10", "TRAK-50")}) == 3


@pytest.mark.parametrize("name", ["IF explicit", "IF-CG", "TRAK-10", "EK-FAC (dattri)", "TracIn", "Grad-Dot"])
def test_positive_helps(name: str, convex: Bench) -> None:
    found = convex.compare({name: peers(convex)[name]}, [0])
    assert found.estimate(name).low > 0


def test_the_best_setting_is_taken_and_told(convex: Bench) -> None:
    every = {each.note: each for each in peers(convex)["IF-CG"].score(convex, convex.states([0]))}
    assert list(every) == ["λ=0.1", "λ=0.01"]
    found = convex.score(peers(convex)["IF-CG"], 0)
    note, rest = found.note.split(", ")
    assert rest == "the best of 2" and found.tried == 2
    torch.testing.assert_close(found.scores, every[note].scores)


def test_scores_that_are_not_finite_are_said_to_be_so(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> MethodScores:
        return MethodScores(torch.full((10, 60), torch.nan), 0, 0)

    monkeypatch.setattr(module, "run_timed", broken)
    found = small.compare({"broken": peers(small)["IF-Arnoldi"]}, [0])
    assert "| broken | undefined |" in found.to_markdown()
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))["methods"]["broken"]
    assert values["lds"]["value"] is None and values["notes"] == ["not finite"]


def test_data_of_another_form_is_refused(small: Bench, tmp_path: Path) -> None:
    x, y = small.protocol.train.examples.gather(torch.arange(60))
    train = replace(small.protocol.train, data=Data({"x": x, "labels": y, "more": y}, device=torch.device("cpu")))
    other = Bench(replace(small.protocol, train=train), tmp_path, progress=False)
    with pytest.raises(DataError, match=r"peers need data of the form \(x, y\)"):
        peers(other)


def test_without_dattri_the_extra_that_has_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dattri.task", None)
    monkeypatch.delitem(sys.modules, "imprint.benchmarking.peers")
    with pytest.raises(MissingExtra, match=r"a benchmark with peers needs .*imprint-attribution\[bench\]"):
        importlib.import_module("imprint.benchmarking.peers")
