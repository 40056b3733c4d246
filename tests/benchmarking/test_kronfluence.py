"""EK-FAC by kronfluence scores a small benchmark, in our orientation."""

import importlib
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from imprint import ConfigurationError, DataError
from imprint.benchmarking.bench import Bench
from imprint.data import Data
from tests.benches import little_digits, toy

pytestmark = pytest.mark.wide
needs_kronfluence = pytest.mark.skipif(not find_spec("kronfluence"), reason="kronfluence is not installed")


@pytest.fixture(autouse=True)
def one_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("kronfluence"):
        monkeypatch.setattr("imprint.benchmarking.kronfluence.DAMPINGS", (0.1,))


@needs_kronfluence
def test_it_scores_every_example_at_the_end_and_early(tmp_path: Path) -> None:
    from imprint.benchmarking.kronfluence import kronfluence_peers

    bench = Bench(replace(little_digits(), checkpoints=(2, 3)), tmp_path, progress=False)
    methods = kronfluence_peers(bench)
    assert list(methods) == ["EK-FAC (kronfluence)", "EK-FAC (kronfluence), early"]
    runs = bench.states([0])
    (ended,) = methods["EK-FAC (kronfluence)"].score(bench, runs)
    second, third, mean = methods["EK-FAC (kronfluence), early"].score(bench, runs)
    assert ended.note == "epoch 6, λ=0.1" and third.note == "epoch 3, λ=0.1"
    assert mean.note == "mean of epochs 2, 3, λ=0.1"
    for found in (ended, second, third):
        assert found.scores.shape == (10, 60) and found.scores.isfinite().all()
        assert (found.scores.std(dim=1) > 0).all()
    torch.testing.assert_close(mean.scores, (second.scores + third.scores) / 2)
    assert not torch.allclose(second.scores, third.scores, rtol=0.01)
    (again,) = methods["EK-FAC (kronfluence)"].score(bench, runs)
    torch.testing.assert_close(again.scores, ended.scores)  # though the Fisher matrix samples labels


@needs_kronfluence
def test_with_much_damping_it_multiplies_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from imprint.benchmarking import kronfluence

    monkeypatch.setattr(kronfluence, "DAMPINGS", (1e6,))
    bench = Bench(little_digits(), tmp_path, progress=False)
    (found,) = kronfluence.kronfluence_peers(bench, ())["EK-FAC (kronfluence)"].score(bench, bench.states([0]))
    task = bench.protocol.build_task("margin")
    task.model.load_state_dict(bench.states([0])[0][-1])
    task.model.eval()
    data = bench.protocol.train.examples

    def gradients(values: torch.Tensor) -> torch.Tensor:
        rows = [torch.autograd.grad(v, list(task.model.parameters()), retain_graph=True) for v in values]
        return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])

    margins = gradients(task.measure(task.model, bench.protocol.queries))
    losses = gradients(task.loss(task.model, data.gather(torch.arange(len(data)))))
    expected = -margins @ losses.T / 1e6
    torch.testing.assert_close(found.scores, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@needs_kronfluence
def test_positive_helps(tmp_path: Path) -> None:
    from imprint.benchmarking.kronfluence import kronfluence_peers

    protocol = toy(halves=30)
    x, y = protocol.train.examples.gather(torch.arange(40))
    train = replace(protocol.train, data=(x.float(), y), build=lambda: nn.Sequential(nn.Linear(4, 3)))
    queries = (protocol.queries[0].float(), protocol.queries[1])
    bench = Bench(replace(protocol, train=train, queries=queries), tmp_path, progress=False)
    for name, method in kronfluence_peers(bench, (3,)).items():
        assert bench.compare({name: method}, [0]).estimate(name).low > 0


@needs_kronfluence
def test_data_of_another_form_is_refused(tmp_path: Path) -> None:
    from imprint.benchmarking.kronfluence import kronfluence_peers

    protocol = little_digits()
    x, y = protocol.train.examples.gather(torch.arange(60))
    train = replace(protocol.train, data=Data({"x": x, "labels": y, "more": y}, device=torch.device("cpu")))
    bench = Bench(replace(protocol, train=train), tmp_path, progress=False)
    with pytest.raises(DataError, match=r"kronfluence needs data of the form \(x, y\)"):
        kronfluence_peers(bench)


def test_without_kronfluence_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kronfluence.analyzer", None)
    for name in ("kronfluence", "ekfac"):
        monkeypatch.delitem(sys.modules, f"imprint.benchmarking.{name}", raising=False)
    monkeypatch.delattr("imprint.benchmarking.ekfac", raising=False)
    with pytest.raises(ConfigurationError, match="pip install --no-deps kronfluence"):
        importlib.import_module("imprint.benchmarking.kronfluence")
