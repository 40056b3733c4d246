"""A fine-tune that was repeated without each source is exported as the adapters without it."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from imprint import ReadoutError, RunRecorder, Store, Task, attribute, simulate
from imprint.export import Export, read, read_peft, to_onnx, to_peft
from imprint.export.likelihood import log_likelihood
from imprint.validation.verdict import Figures, Verdict
from tests.export import models

N, EPOCHS = 9, 3


def fine_tune(folder: Path) -> tuple[Task, Any]:
    """Record the fine-tuning of an adapter, by batches of three documents."""
    model = models.adapted("gpt2", moved=True)
    model.eval()  # which has no dropout then
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run, data = RunRecorder(folder, model, torch.optim.AdamW(trained, lr=0.01)), models.data()
    for indices in run.batches(N, 3, epochs=EPOCHS):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            losses = models.loss(model, {name: column[indices] for name, column in data.items()})
            step.backward(losses.mean())
            run.optimiser.step()
    return models.task(model, "*lora_*"), run.finish()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Store, Export]:
    folder = tmp_path_factory.mktemp("removals")
    task, run = fine_tune(folder / "train")
    store = simulate(task, models.data(), models.sources(), run=run, out=folder / "store", progress=False)
    return task, store, to_peft(task, store, folder / "adapters", models.queries())


@torch.no_grad()
def values(found: Export, adapter: str) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(found.folder / "model")
    adapted: Any = peft.PeftModel.from_pretrained(model, found.folder / adapter)
    return log_likelihood(adapted.eval(), models.queries()).double()


def test_the_adapter_without_a_source_changes_the_log_likelihood_by_the_effect_of_its_removal(exported: Any) -> None:
    task, store, found = exported
    effects = torch.as_tensor(attribute(task, store, models.queries(), progress=False).removal_effect)
    deployed = values(found, "adapters/base")
    assert found.removes and [source.plus for source in found.sources] == ["adapters/base"] * models.SOURCES
    for index, source in enumerate(found.sources):
        assert source.minus == f"adapters/{index:04d}-without"
        torch.testing.assert_close(values(found, source.minus) - deployed, effects[:, index], rtol=1e-3, atol=1e-5)
    names = {path.name for path in (found.folder / "adapters").iterdir()}
    assert names == {"base", "0000-without", "0001-without", "0002-without"}


def test_an_engine_s_log_likelihoods_become_scores(exported: Any) -> None:
    task, store, found = exported
    expected = torch.as_tensor(attribute(task, store, models.queries(), progress=False).scores)
    without = torch.stack([values(found, str(source.minus)) for source in found.sources], 1)
    deployed = values(found, "adapters/base")[:, None]
    for plus in (deployed, deployed.expand_as(without)):
        assert models.deviation(read(found, plus, without).measured, expected) < 1e-3
    model = AutoModelForCausalLM.from_pretrained(found.folder / "model")
    assert models.deviation(read_peft(found.folder, model, models.queries()).measured, expected) < 1e-3


def test_the_record_says_how_it_was_tested(exported: Any) -> None:
    _, store, found = exported
    again = Export.open(found.folder)
    assert again.removes and again.self_test.readout == "removed" and again.self_test.exact < 1e-3
    assert again.gains.tolist() == pytest.approx([1 / (2 * store.n)] * models.SOURCES)
    assert "an adapter without each" in repr(again) and "central" not in repr(again)


def test_half_precision_has_a_noise_floor(exported: Any, tmp_path: Path) -> None:
    task, store, found = exported
    half = to_peft(task, store, tmp_path / "half", models.queries(), dtype="bfloat16")
    assert float(half.floors.min()) > 10 * float(found.floors.max())


def test_a_graph_of_both_sides_is_refused(exported: Any, tmp_path: Path) -> None:
    task, store, _ = exported
    with pytest.raises(ReadoutError, match=r"removals that were really made: export the adapters without each source"):
        to_onnx(task, store, tmp_path / "graph", models.queries())
    assert not (tmp_path / "graph").exists()


def test_exports_of_a_path_are_pairs_still(tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    found = to_peft(task, store, tmp_path / "pairs", models.queries())
    assert not found.removes and found.sources[0].plus == "adapters/0000-plus"


def test_an_export_says_which_question_it_answers_and_whether_it_was_validated(exported: Any, tmp_path: Path) -> None:
    task, store, found = exported
    assert (found.question, found.validation) == ("this_run", None)
    assert "this run: if this source" in repr(found) and "not validated" in repr(found)
    figures = Figures(30, 8, 6, 1, correlation=0.9, p=0.001, slope=1.0, slope_low=0.8, slope_high=1.2, by_size=0.1)
    verdict = Verdict("this_run", figures, chaos=0.1, deviation=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imprint.export.writing.find_verdict", lambda store, measure: verdict)
        to_peft(task, store, tmp_path / "adapters", models.queries())
    opened = Export.open(tmp_path / "adapters")
    assert opened.validation == verdict and "ranks and sizes validated" in repr(opened)
