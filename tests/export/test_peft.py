"""Adapters that PEFT loads on the plain model score as `central` does at the same gains."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from imprint import Plan, ReadoutError, Sources, StoreError, Task, attribute, export, language, simulate
from imprint.export import Export, gains
from imprint.export import peft as writing
from imprint.export.likelihood import log_likelihood
from imprint.store.files import sha256
from imprint.store.reading import Store
from imprint.store.values import sealed
from tests.export import models

CASES = [("gpt2", "*lora_B*", 4, False), ("gpt2", "*lora_*", 8, True), ("llama", "*lora_B*", 4, False)]


@pytest.fixture(scope="module", params=CASES, ids=["gpt2", "gpt2 A and B, scale 2", "llama"])
def exported(request: Any, tmp_path_factory: Any) -> tuple[str, Task, Store, Export]:
    kind, parameters, alpha, moved = request.param
    task, store = models.prepared(kind, parameters, alpha, moved)
    return kind, task, store, export.to_peft(task, store, tmp_path_factory.mktemp("out") / "x", models.queries())


def _model(found: Export) -> Any:
    return AutoModelForCausalLM.from_pretrained(found.folder / "model")


@torch.no_grad()
def _values(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return log_likelihood(model.eval(), batch).double()


def test_adapters_loaded_one_by_one_score_as_central_does(exported: Any) -> None:
    _, task, store, found = exported
    columns = []
    for source in found.sources:
        ends = []
        for path in (source.plus, source.minus):
            ends.append(_values(peft.PeftModel.from_pretrained(_model(found), found.folder / path), models.queries()))
        columns.append((ends[0] - ends[1]) / (2 * source.gain))
    assert models.deviation(torch.stack(columns, 1), models.central(task, store, found)) < 1e-4


def test_a_mixed_batch_of_adapters_scores_as_central_does(exported: Any) -> None:
    _, task, store, found = exported
    asked = models.queries()
    adapted = peft.PeftModel.from_pretrained(_model(found), found.folder / "adapters/base", adapter_name="base")
    names = []
    for index, source in enumerate(found.sources):
        for path, sign in ((source.plus, "plus"), (source.minus, "minus")):
            names.append(f"{index}{sign}")
            adapted.load_adapter(found.folder / path, adapter_name=names[-1])
    rows = [name for name in names for _ in range(4)]
    with torch.no_grad():
        ids = asked["input_ids"].repeat(len(names), 1)
        logits = adapted.eval()(input_ids=ids, adapter_names=rows).logits
    each = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    values = (each * asked["weights"].repeat(len(names), 1)[:, 1:]).sum(1).reshape(-1, 2, 4).double()
    scores = export.read(found, values[:, 0].T, values[:, 1].T)
    assert models.deviation(scores.measured, models.central(task, store, found)) < 1e-4


def test_read_peft_scores_queries_it_was_not_tested_on_and_leaves_the_model_plain(exported: Any) -> None:
    _, task, store, found = exported
    model, other = _model(found), models.columns(5, seed=9)
    before = _values(model, other)
    scores = export.read_peft(found.folder, model, other)
    assert models.deviation(scores.measured, models.central(task, store, found, other)) < 1e-4
    assert torch.equal(_values(model, other), before)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_scores_are_those_of_attribute_up_to_the_recorded_deviation(exported: Any) -> None:
    _, task, store, found = exported
    exact = attribute(task, store, models.queries(), progress=False).scores.double()
    read = export.read_peft(found, _model(found), models.queries()).measured
    assert found.self_test.readout == "jvp"
    assert models.deviation(read * found.gains, exact * found.gains) == pytest.approx(found.self_test.exact, rel=1e-2)
    assert found.self_test.central < 1e-4
    assert found.self_test.exact < 0.02


def test_the_base_adapter_is_the_read_out_point(exported: Any) -> None:
    _, task, store, found = exported
    adapted = peft.PeftModel.from_pretrained(_model(found), found.folder / "adapters/base")
    with torch.no_grad(), task.evaluating():
        expected = task.call(log_likelihood, store.state(0, task), models.queries())
    assert torch.allclose(_values(adapted, models.queries()), expected.double(), rtol=1e-5)
    assert not torch.allclose(_values(_model(found), models.queries()), expected.double(), rtol=1e-5)


def test_adapters_are_ordinary_ones_with_a_scale_of_1(exported: Any) -> None:
    _, _, _, found = exported
    for path in (found.folder / "adapters/base", found.folder / found.sources[0].plus):
        config = peft.PeftConfig.from_pretrained(path)
        assert (config.r, config.lora_alpha, config.bias, config.task_type) == (4, 4, "none", "CAUSAL_LM")
        tensors = load_file(path / "adapter_model.safetensors")
        expected = {f"base_model.model.{layer}.lora_{part}.weight" for layer in found.layers for part in "AB"}
        assert set(tensors) == expected
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_layers_of_several_ranks_are_exported(tmp_path: Path) -> None:
    plain = models.gpt2(n_inner=16)  # none of its layers is wider than the model
    task = language.task(plain, parameters="lora:2:last:1")
    store = simulate(task, models.data(), models.sources(), models.PLAN, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    config = json.loads((found.folder / "adapters/base/adapter_config.json").read_text())
    assert {rank for rank, _, _ in found.layers.values()} == {1, 2}
    assert config["r"] == config["lora_alpha"] == 2
    assert config["rank_pattern"] == config["alpha_pattern"] and set(config["rank_pattern"].values()) == {1}
    assert found.self_test.central < 1e-4


def test_a_preset_of_the_language_task_is_exported(tmp_path: Path) -> None:
    task = language.task(models.llama(), parameters="lora:20:last:1")
    store = simulate(task, models.data(), models.sources(), models.PLAN, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    assert {rank for rank, _, _ in found.layers.values()} == {24}  # all of its inputs
    read = export.read_peft(found.folder, models.llama(), models.queries())  # the task's own model, which has no name
    assert models.deviation(read.measured, models.central(task, store, found)) < 1e-4


def _tuned(folder: Path, whole: bool) -> Any:
    """A model from a folder, trained since with the name of that folder in it: all of it, or an adapter with biases."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if not whole:
        bias: Any = {"bias": "lora_only", "task_type": "CAUSAL_LM"}
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, **bias))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.1)
    for _ in range(10):
        optimiser.zero_grad()
        models.loss(model, models.data()).mean().backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("whole", [True, False], ids=["trained", "fine-tuned with biases"])
def test_an_export_belongs_to_the_weights_of_the_checkpoint_and_not_to_a_name(whole: bool, tmp_path: Path) -> None:
    models.gpt2().save_pretrained(tmp_path / "start")
    model = _tuned(tmp_path / "start", whole)
    task = language.task(model, parameters="lora:4" if whole else "*lora_*")
    plan = Plan(engine="tangent", steps=3, lr=0.1)
    store = simulate(task, models.data(), models.sources(), plan, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    assert found.model == "model"
    about = peft.PeftConfig.from_pretrained(str(found.folder / "adapters/base"))
    scores = export.read_peft(
        found, AutoModelForCausalLM.from_pretrained(about.base_model_name_or_path), models.queries()
    )
    assert models.deviation(scores.measured, models.central(task, store, found)) < 1e-4
    with pytest.raises(ReadoutError, match="is not the one under the adapter: 'transformer"):
        export.to_peft(task, store, tmp_path / "y", models.queries(), base=tmp_path / "start")
    named = export.to_peft(task, store, tmp_path / "z", models.queries(), base=found.folder / "model")
    assert named.model == str(found.folder / "model") and not (named.folder / "model").exists()
    about = peft.PeftConfig.from_pretrained(str(named.folder / "adapters/base"))
    assert about.base_model_name_or_path == named.model


def test_a_base_that_computes_otherwise_or_is_not_there_is_refused(tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    plain = models.gpt2()
    plain.config.layer_norm_epsilon = 0.1
    plain.save_pretrained(tmp_path / "other")
    with pytest.raises(ReadoutError, match="another base model"):
        export.to_peft(task, store, tmp_path / "x", models.queries(), base=tmp_path / "other")
    with pytest.raises(ReadoutError, match=r"the base model .* cannot be loaded"):
        export.to_peft(task, store, tmp_path / "x", models.queries(), base=tmp_path / "nowhere")


def test_the_checkpoint_with_the_most_weight_is_exported(tmp_path: Path) -> None:
    task = models.task(models.adapted("gpt2", moved=True))
    later = {name: t + 0.1 if name.endswith("ln_f.weight") else t for name, t in task.state().items()}
    plan = Plan(engine="tangent", steps=2, lr=0.1, weight=(1.0, 3.0))
    options: Any = {"checkpoints": [task.state(), later], "progress": False}
    store = simulate(task, models.data(), models.sources(), plan, **options)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    assert found.checkpoint == 1
    scores = export.read_peft(found, _model(found), models.queries())
    assert models.deviation(scores.measured, models.central(task, store, found)) < 1e-4
    with pytest.raises(ReadoutError, match="another base model, or with other weights"):
        export.read_peft(found, models.gpt2(), models.queries())


def test_an_adapter_that_is_loaded_and_not_active_is_left_out(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    elsewhere = peft.LoraConfig(r=4, target_modules=["c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(models.gpt2(), config, adapter_name="first")
    model.add_adapter("second", elsewhere)
    task = models.task(model.eval(), "*lora_B.first*")
    store = simulate(task, models.data(), models.sources(), models.PLAN, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    assert {path.rsplit(".", 1)[-1] for path in found.layers} == {"c_attn"}
    scores = export.read_peft(found, _model(found), models.queries())
    assert models.deviation(scores.measured, models.central(task, store, found)) < 1e-4


def test_adapters_of_a_model_in_float64_are_in_float64(tmp_path: Path) -> None:
    task = models.task(models.adapted("gpt2").double())
    data = {name: t.double() if t.is_floating_point() else t for name, t in models.data().items()}
    store = simulate(task, data, models.sources(), models.PLAN, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    tensors = load_file(found.folder / "adapters/base/adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}


def test_scores_far_from_the_exact_derivative_are_told_of(tmp_path: Path, caplog: Any) -> None:
    task, store = models.prepared("llama")
    full = export.to_peft(task, store, tmp_path / "full", models.queries())
    assert full.self_test.exact < 0.05 and "exact derivative" not in caplog.text
    half = export.to_peft(task, store, tmp_path / "half", models.queries(), dtype="bfloat16")
    assert half.self_test.served > 0.05 and "deviate from the exact derivative" in caplog.text


def test_a_choice_of_sources_keeps_its_order(tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    found = export.to_peft(task, store, tmp_path / "x", models.queries(), sources=["site/2", "site/0"])
    assert found.ids == ["site/2", "site/0"]
    read = export.read_peft(found, _model(found), models.queries())
    assert models.deviation(read.measured, models.central(task, store, found)) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gains_for_half_precision_rise_above_its_noise(dtype: str, tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    full = export.to_peft(task, store, tmp_path / "full", models.queries())
    half = export.to_peft(task, store, tmp_path / "half", models.queries(), dtype=dtype)
    assert bool((half.gains > full.gains).all())
    assert bool((half.floors > full.floors).all())
    exact = attribute(task, store, models.queries(), progress=False).scores.double()
    model = _model(half).to(getattr(torch, dtype))
    read = export.read_peft(half, model, models.queries())
    with pytest.raises(ReadoutError, match=f"the model is in {dtype}, and gains and noise floors .* are for float32"):
        export.read_peft(full, model, models.queries())
    for_half = replace(full, dtype=dtype, probes=half.probes, rounding=half.rounding)
    small = export.read_peft(for_half, model, models.queries())
    assert models.deviation(read.measured, exact) < min(0.1, models.deviation(small.measured, exact))
    above = ~read.refused  # what is not refused has the right sign
    assert int(above.sum()) >= 8
    assert torch.equal(read.measured.sign()[above], exact.sign()[above])


def test_what_rounding_makes_lies_under_the_noise_floor(tmp_path: Path) -> None:
    """Of a source without any effect, read in half precision: its scores are rounding and nothing else."""
    task, store = models.prepared("gpt2")
    found = export.to_peft(task, store, tmp_path / "x", models.queries(), dtype="bfloat16")
    model, other = _model(found).to(torch.bfloat16), models.columns(16, seed=11)
    served = export.read_peft(found, model, other).measured
    wide = models.central(task, store, found, other)
    noise = (served - wide).abs() / found.floors
    assert float((noise < 1).double().mean()) > 0.95
    assert float(noise.max()) > 0.1  # and the floor is not just very high


def test_artefacts_that_score_otherwise_are_refused_and_removed(tmp_path: Path, monkeypatch: Any) -> None:
    task, store = models.prepared("gpt2")
    written = writing._write_adapter

    def wrong(folder: Path, layers: Any, parameters: Any, about: Any) -> None:
        scale = 1.001 if folder.name.endswith("plus") else 1.0
        written(folder, layers, {n: t * scale if "lora_B" in n else t for n, t in parameters.items()}, about)

    monkeypatch.setattr(writing, "_write_adapter", wrong)
    with pytest.raises(ReadoutError, match="the self-test failed, and nothing was exported"):
        export.to_peft(task, store, tmp_path / "x", models.queries())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "passes"), [(3e-5, True), (1e-7, False)], ids=["rounded", "drowned"])
def test_what_rounding_makes_is_told_and_not_held_against_an_export(
    step: float, passes: bool, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task, store = models.prepared("gpt2")
    monkeypatch.setattr(gains, "_STEPS", (step,))
    if passes:
        found = export.to_peft(task, store, tmp_path / "x", models.queries())
        assert 1e-4 < found.self_test.central < 0.01
        assert "differ by" in caplog.text and "where rounding makes" in caplog.text
    else:
        with pytest.raises(ReadoutError, match=r"more than 1e-04; rounding makes \de-0[12]"):
            export.to_peft(task, store, tmp_path / "x", models.queries())


def test_a_folder_that_holds_something_is_left_alone_and_refused_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    task, store = models.prepared("gpt2")
    monkeypatch.setattr(writing, "choose_gains", None)  # which takes its time, is not even called
    (tmp_path / "note").write_text("mine")
    with pytest.raises(StoreError, match="holds something else"):
        export.to_peft(task, store, tmp_path, models.queries())
    with pytest.raises(StoreError, match="is a file"):
        export.to_peft(task, store, tmp_path / "note", models.queries())
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_source_with_a_zero_imprint_has_scores_of_zero_that_are_refused(tmp_path: Path) -> None:
    model = models.adapted("gpt2", blocks=[1, 2])
    task, data = models.task(model), models.data()
    data["weights"][0] = 0  # nothing is predicted in it
    groups = Sources.groups({"nothing": [0], "all": range(9)})
    store = simulate(task, data, groups, models.PLAN, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    read = export.read_peft(found, _model(found), models.queries())
    assert bool(read.refused[:, 0].all()) and not bool(read.refused[:, 1].any())


def test_an_adapter_of_the_output_head_is_told_of_and_named_in_full(tmp_path: Path, caplog: Any) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["lm_head", "layers.1.self_attn.q_proj"])
    task = models.task(peft.get_peft_model(models.llama(), config))
    store = simulate(task, models.data(), models.sources(), models.PLAN, progress=False)
    found = export.to_peft(task, store, tmp_path / "x", models.queries())
    assert "the output head has an adapter" in caplog.text
    targets = peft.PeftConfig.from_pretrained(str(found.folder / "adapters/base")).target_modules
    assert set(targets) == {"lm_head", "model.layers.1.self_attn.q_proj"}  # block 0 has a q_proj without an adapter
    assert (
        models.deviation(
            export.read_peft(found, _model(found), models.queries()).measured, models.central(task, store, found)
        )
        < 1e-4
    )


FIRST = pytest.mark.parametrize("exported", CASES[:1], indirect=True, ids=["gpt2"])


@FIRST
def test_the_configuration_of_an_adapter_cannot_have_a_module_imported(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT imports what `megatron_core` names; a record of the same hand has the right checksum of it."""
    found = exported[3]
    folder = tmp_path / "gift"
    shutil.copytree(found.folder, folder)
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = folder / "adapters/base/adapter_config.json"
    asking = {"megatron_config": {"a": 1}, "megatron_core": "evil"}
    config.write_text(json.dumps({**json.loads(config.read_text()), **asking}))
    record = json.loads((folder / "export.json").read_text())
    record["files"]["adapters/base/adapter_config.json"] = sha256(config)
    record.pop("sha256")
    (folder / "export.json").write_text(json.dumps(sealed(record)))
    with pytest.raises(StoreError, match="megatron_config must be None, as exports have it"):
        export.read_peft(folder, _model(found), models.queries())
    assert not (tmp_path / "ran").exists()


@FIRST
@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "someone/an-adapter-of-the-hub"])
def test_adapters_are_those_of_the_export(path: str, exported: Any, tmp_path: Path) -> None:
    found = exported[3]
    folder = tmp_path / "gift"
    shutil.copytree(found.folder, folder)
    record = json.loads((folder / "export.json").read_text())
    record["sources"][0]["plus"] = path
    record.pop("sha256")
    (folder / "export.json").write_text(json.dumps(sealed(record)))
    with pytest.raises(StoreError, match=r"a path inside the export|is not a file of the export"):
        export.read_peft(folder, _model(found), models.queries())


@FIRST
def test_two_exports_into_one_folder_exclude_each_other(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, task, store, _ = exported
    refused: list[str] = []
    original = writing._write_adapter

    def intrude(*given: Any) -> None:
        if not refused:
            refused.append("")
            with pytest.raises(StoreError, match=r"another process .* is writing") as error:
                export.to_peft(task, store, tmp_path / "out", models.queries())
            refused.append(str(error.value))
        original(*given)

    monkeypatch.setattr(writing, "_write_adapter", intrude)
    (tmp_path / ".out.imprint-0123456789abcdef.tmp").mkdir()  # of one that was killed
    (tmp_path / ".out.tmp").mkdir()  # the user's
    export.to_peft(task, store, tmp_path / "out", models.queries())
    assert len(refused) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.tmp"}
