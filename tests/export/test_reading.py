"""Scores from log-likelihoods that an engine found: what is refused is said, and nothing wrong is read in silence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import (
    DataError,
    Plan,
    ReadoutError,
    SourcesError,
    StoreError,
    Task,
    TaskError,
    attribute,
    export,
    language,
    simulate,
)
from imprint.export import Export
from imprint.export.likelihood import log_likelihood
from imprint.export.lora import plain_model
from imprint.export.point import Point
from imprint.export.reading import scores
from imprint.store.values import sealed
from tests.export import models


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Export:
    task, store = models.prepared("gpt2")
    return export.to_peft(task, store, tmp_path_factory.mktemp("out") / "x", models.queries(), dtype="bfloat16")


@pytest.fixture
def copied(found: Export, tmp_path: Path) -> Path:
    shutil.copytree(found.folder, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_score_is_the_difference_over_twice_the_gain(found: Export) -> None:
    plus, minus = torch.full((2, 3), -7.0), torch.full((2, 3), -9.0)
    read = export.read(found.folder, plus.tolist(), minus.numpy())
    assert torch.allclose(read.measured, 1 / found.gains.expand(2, 3))
    assert read.score(1, "site/1") == pytest.approx(1 / found.sources[1].gain)
    assert read.removal_effect(1, "site/1") == pytest.approx(-1 / found.sources[1].gain / 9)
    assert list(read.accepted(0)) == found.ids


def test_scores_under_the_noise_floor_are_refused_and_said(found: Export, caplog: Any) -> None:
    plus, minus = torch.full((1, 3), -7.0), torch.full((1, 3), -7.0 - 1e-6)
    plus[0, 1] += 5
    read = export.read(found, plus, minus)
    assert read.refused.tolist() == [[True, False, True]]
    assert "2 of 3 scores lie under the noise floor" in caplog.text
    with pytest.raises(ReadoutError, match="under the noise floor of"):
        read.score(0, "site/0")
    assert list(read.accepted(0)) == ["site/1"]
    header, *lines = str(read).splitlines()
    assert "per unit of ε/N" in header and "+ means that the source helps" in header and "−score/N, N = 9" in header
    assert "refused: below the noise floor of" in lines[0] and "refused" not in lines[1]


@pytest.mark.parametrize(
    ("plus", "minus", "message"),
    [
        ([[0.0] * 2], [[0.0] * 2], "of every source"),
        ([0.0] * 3, [0.0] * 3, "of every source"),
        ([[0.0] * 3], [[0.0] * 3] * 2, "minus must be"),
        ([[0.0, float("nan"), 0.0]], [[0.0] * 3], "query 0 under the plus adapter of source 'site/1' is nan"),
        ([[0.0] * 3], [[0.0, 0.0, -float("inf")]], "query 0 under the minus adapter of source 'site/2' is -inf"),
    ],
)
def test_values_that_cannot_be_scores_are_refused(found: Export, plus: Any, minus: Any, message: str) -> None:
    with pytest.raises(ReadoutError, match=message):
        export.read(found, plus, minus)


def test_an_unknown_source_is_refused(found: Export) -> None:
    with pytest.raises(ReadoutError, match="the export has no source 'elsewhere'"):
        export.read(found, torch.zeros(1, 3), torch.ones(1, 3)).score(0, "elsewhere")


@pytest.mark.parametrize("query", [7, 2, -1])
def test_an_unknown_query_is_refused(found: Export, query: int) -> None:
    read = export.read(found, torch.zeros(2, 3), torch.ones(2, 3))
    for ask in (read.accepted, lambda query: read.score(query, "site/0")):
        with pytest.raises(ReadoutError, match=f"there is no query {query}: the scores have 0 to 1"):
            ask(query)


def test_what_is_recorded_is_read_again(found: Export) -> None:
    assert Export.open(found.folder) == found
    assert (found.context, found.vocabulary) == (16, models.VOCABULARY)


def test_an_export_of_another_schema_is_to_be_made_again(copied: Path) -> None:
    record = json.loads((copied / "export.json").read_text())
    old = {name: value for name, value in record.items() if name not in ("context", "sha256")}
    (copied / "export.json").write_text(json.dumps(sealed({**old, "schema": 1})))
    with pytest.raises(StoreError, match="its schema is 1, this version reads 3: export again"):
        Export.open(copied)


def test_an_export_is_shown_in_a_few_lines(found: Export) -> None:
    lines = repr(found).splitlines()
    assert lines[0] == f"3 sources in {found.folder}"
    assert lines[1].startswith("self-test on 4 queries: ") and lines[1].endswith("served in bfloat16")
    assert lines[2].startswith("noise floors of scores: ")


def _unreadable() -> list[tuple[dict[str, torch.Tensor], str]]:
    """Queries that no model of these tests can take, and why."""
    asked = models.queries()
    long = {name: torch.cat([column, column], 1) for name, column in asked.items()}
    above, below = ({**asked, "input_ids": asked["input_ids"].clone()} for _ in range(2))
    above["input_ids"][2, 1], below["input_ids"][2, 1] = models.VOCABULARY, -1
    return [
        (long, "queries of 24 tokens are 8 more than the context of the exported model, 16: give length=16"),
        (above, "there is a token 30, and the exported model knows tokens from 0 to 29"),
        (below, "there is a token -1, and the exported model knows tokens from 0 to 29"),
    ]


def test_queries_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    task, store, graph = models.graph("gpt2", "*lora_B*", 4, False)
    adapters = export.to_peft(task, store, tmp_path / "adapters", models.queries())
    reader = export.OnnxReader(graph)
    plain = models.gpt2()
    for asked, message in _unreadable():
        with pytest.raises(DataError, match=message):
            export.read_peft(adapters, plain, asked)
        with pytest.raises(DataError, match=message):
            reader.scores(asked)
        with pytest.raises(DataError, match=message):
            export.to_peft(task, store, tmp_path / "x", asked)


def test_one_of_several_checkpoints_is_exported_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    task, one = models.prepared("gpt2")
    export.to_peft(task, one, tmp_path / "one", models.queries())
    assert "is exported" not in caplog.text
    later = {name: tensor + 0.1 if "lora_B" in name else tensor for name, tensor in task.state().items()}
    states = [task.state(), later]
    two = simulate(task, models.data(), models.sources(), models.PLAN, checkpoints=states, progress=False)
    export.to_peft(task, two, tmp_path / "two", models.queries(), checkpoint=1)
    assert "checkpoint 1 is exported, one of 2: scores of attribute are the mean over all of them" in caplog.text
    read = export.read_peft(tmp_path / "two", models.gpt2(), models.queries()).measured
    mean = attribute(task, two, models.queries(), progress=False).scores.double()
    assert models.deviation(read, mean) > 10 * Export.open(tmp_path / "two").self_test.exact


def test_another_folder_or_kind_is_refused(found: Export, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no export"):
        export.read(tmp_path, [], [])
    with pytest.raises(StoreError, match="is an export of kind 'peft', not 'onnx'"):
        export.read_onnx(found.folder, models.queries())
    with pytest.raises(StoreError, match="is an export of kind 'peft', not 'onnx'"):
        export.read_onnx(found, models.queries())


def test_a_changed_record_or_file_is_refused(copied: Path) -> None:
    adapter = copied / "adapters/0001-plus/adapter_model.safetensors"
    adapter.write_bytes((copied / "adapters/0000-plus/adapter_model.safetensors").read_bytes())
    with pytest.raises(StoreError, match="is not the file that was exported"):
        Export.open(copied)
    adapter.unlink()
    with pytest.raises(StoreError, match="is missing: the export is damaged"):
        Export.open(copied)
    record = json.loads((copied / "export.json").read_text())
    record["sources"][0]["gain"] *= 2
    (copied / "export.json").write_text(json.dumps(record))
    with pytest.raises(StoreError, match="was changed after it was written"):
        Export.open(copied)


def test_adapters_of_the_wrong_shape_or_another_model_are_refused(found: Export) -> None:
    with pytest.raises(ReadoutError, match="the model has no linear layer 'transformer"):
        export.read_peft(found, models.llama(), models.queries())
    import transformers

    kind: Any = transformers.GPT2LMHeadModel
    wider = kind(transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=24, n_layer=3, n_head=2))
    with pytest.raises(ReadoutError, match="are for a weight of 48 × 16, the model's is 24 × 72"):
        export.read_peft(found, wider, models.queries())
    with pytest.raises(ReadoutError, match="the model has adapters already"):
        export.read_peft(found, models.adapted("gpt2"), models.queries())
    other = models.gpt2()
    torch.nn.init.normal_(other.transformer.h[0].mlp.c_fc.weight)
    with pytest.raises(ReadoutError, match=r"the log-likelihood of probe 0 is .* another base model"):
        export.read_peft(found, other, models.queries())
    assert not any("lora" in name for name, _ in other.named_modules())


def test_other_weights_are_recognised_in_half_precision(found: Export) -> None:
    """Also those whose log-likelihoods differ by less than a tenth; two of their scores have the wrong sign."""
    own, other = (models.gpt2() for _ in range(2))
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (parameter for parameter in other.parameters() if parameter.dim() > 1):
            parameter += 0.15 * parameter.std() * torch.randn(parameter.shape, generator=noise)
        before, after = (log_likelihood(model, models.queries()) for model in (own, other))
    assert bool(((after - before).abs() < 0.1 * (1 + before.abs())).all())
    export.read_peft(found, own.to(torch.bfloat16), models.queries())
    with pytest.raises(ReadoutError, match=r"the log-likelihood of probe \d is .* another base model"):
        export.read_peft(found, other.to(torch.bfloat16), models.queries())


def test_an_export_for_one_half_precision_is_not_read_in_another(found: Export) -> None:
    with pytest.raises(ReadoutError, match=r"the model is in float16, and gains and noise floors .* are for bfloat16"):
        export.read_peft(found, models.gpt2().to(torch.float16), models.queries())


def test_a_store_without_lora_parameters_is_told_which_preset_to_use(tmp_path: Path) -> None:
    task = models.task(models.gpt2(), "transformer.h.2.mlp.c_fc.*")
    store = simulate(task, models.data(), models.sources(), models.PLAN, progress=False)
    with pytest.raises(TaskError, match=r"is no LoRA parameter.*parameters=\"lora:8\""):
        export.to_peft(task, store, tmp_path / "x", models.queries())
    with pytest.raises(TaskError, match="is no LoRA parameter"):
        export.to_onnx(task, store, tmp_path / "x", models.queries())


def test_what_an_adapter_file_cannot_say_is_refused(tmp_path: Path) -> None:
    import peft

    _, store = models.prepared("gpt2")
    dora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)
    with pytest.raises(TaskError, match="is not a plain LoRA of a linear layer"):
        export.to_peft(models.task(peft.get_peft_model(models.gpt2(), dora)), store, tmp_path / "x", models.queries())
    embedded = peft.LoraConfig(r=2, target_modules=["wpe"])
    lookup = models.task(peft.get_peft_model(models.gpt2(), embedded), "*lora*")
    with pytest.raises(TaskError, match="is not a plain LoRA of a linear layer"):
        export.to_peft(lookup, store, tmp_path / "x", models.queries())
    two = models.adapted("gpt2", blocks=[1, 2])
    two.add_adapter("second", two.peft_config["default"])
    two.base_model.set_adapter(["default", "second"])
    with pytest.raises(TaskError, match="has 2 active adapters"):
        export.to_peft(models.task(two), store, tmp_path / "x", models.queries())
    conv = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3)), peft.LoraConfig(r=1, target_modules=["0"])
    )
    with pytest.raises(TaskError, match="is on a Conv1d: those of linear layers"):
        export.to_peft(Task.classifier(conv), store, tmp_path / "x", models.queries())
    half = language.task(models.gpt2(), parameters="lora:2", compute="bfloat16")
    with pytest.raises(TaskError, match="the task computes in bfloat16"):
        export.to_peft(half, store, tmp_path / "x", models.queries())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head' is a ModulesToSaveWrapper of PEFT"),
        ({"trainable_token_indices": [1, 2]}, "embed_tokens' is a TrainableTokensWrapper of PEFT"),
    ],
)
def test_what_peft_trains_beside_an_adapter_is_refused_by_name(option: Any, message: str, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], **option)
    task = models.task(peft.get_peft_model(models.llama(), config), "*lora_*")
    plan = Plan(engine="tangent", steps=1, lr=0.05)
    store = simulate(task, models.data(), models.sources(), plan, progress=False)
    with pytest.raises(TaskError, match=message):
        export.to_peft(task, store, tmp_path / "x", models.queries())


def test_a_checkpoint_that_does_not_fill_the_plain_model_is_refused() -> None:
    task, _ = models.prepared("gpt2")
    state = task.state()
    lacking = {name: tensor for name, tensor in state.items() if not name.endswith("ln_f.weight")}
    for given in (lacking, {**state, "elsewhere": torch.zeros(1)}):
        with pytest.raises(
            TaskError, match=r"'(transformer.ln_f.weight|elsewhere)' is in the model or in its checkpoint"
        ):
            plain_model(task, given)


def test_a_model_that_overflows_in_the_serving_precision_is_refused(tmp_path: Path) -> None:
    model = models.adapted("gpt2")
    with torch.no_grad():
        model.get_base_model().transformer.ln_f.weight.mul_(1e6)
    task = models.task(model)
    plan = Plan(engine="tangent", steps=1, lr=1e-6)
    store = simulate(task, models.data(), models.sources(), plan, progress=False)
    with pytest.raises(ReadoutError, match="no finite log-likelihoods in float16"):
        export.to_peft(task, store, tmp_path / "x", models.queries(), dtype="float16")


def test_what_cannot_be_traced_or_written_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("data-dependent branch")

    task, store = models.prepared("gpt2")
    (tmp_path / "note").write_text("a file")
    with pytest.raises(StoreError, match="could not write the export"):
        export.to_peft(task, store, tmp_path / "note" / "x", models.queries())
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ReadoutError, match="cannot be exported to ONNX: RuntimeError: data-dependent branch"):
        export.to_onnx(task, store, tmp_path / "x", models.queries())
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_graph_that_overflows_gives_no_scores(found: Export) -> None:
    with pytest.raises(ReadoutError, match="the score of query 0 for source 'site/1' is not finite"):
        scores(found, torch.tensor([[0.0, float("inf"), 0.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sources": ["site/9"]}, SourcesError, "the store has no source 'site/9'; did you mean site/"),
        ({"sources": "site/1"}, SourcesError, "must be a list of ids"),
        ({"sources": []}, SourcesError, "must be a list of ids"),
        ({"sources": ["site/1", "site/1"]}, SourcesError, "asked for twice"),
        ({"checkpoint": 3}, ReadoutError, "checkpoint 3 is not in the store: it has 0"),
        ({"dtype": "int8"}, ReadoutError, "dtype 'int8' is unknown"),
    ],
)
def test_wrong_choices_are_refused(options: Any, error: Any, message: str, tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    with pytest.raises(error, match=message):
        export.to_peft(task, store, tmp_path / "x", models.queries(), **options)


def test_queries_and_measurements_of_another_kind_are_refused(tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    asked = models.queries()
    with pytest.raises(DataError, match="the columns input_ids and weights"):
        export.to_peft(task, store, tmp_path / "x", (asked["input_ids"], asked["weights"]))
    with pytest.raises(DataError, match=r"must both be \(queries, tokens\)"):
        export.to_peft(task, store, tmp_path / "x", {**asked, "weights": asked["weights"][:, 1:]})
    with pytest.raises(ReadoutError, match="not finite at the checkpoint"):
        export.to_peft(task, store, tmp_path / "x", {**asked, "weights": asked["weights"] * float("nan")})
    by_loss = Task(task.model, loss=models.loss, parameters="*lora_B*")
    with pytest.raises(TaskError, match="the task measures 'loss', and exports score the log-likelihood"):
        export.to_peft(by_loss, store, tmp_path / "x", asked)
    with pytest.raises(TaskError, match="must be an imprint"):
        export.to_peft(task.model, store, tmp_path / "x", asked)  # type: ignore[arg-type]


def test_gains_are_not_chosen_by_scores_that_say_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    task, store = models.prepared("gpt2")
    asked = models.queries()
    with pytest.raises(ReadoutError, match="0 throughout, or not finite"):
        export.to_peft(task, store, tmp_path / "x", {**asked, "weights": asked["weights"] * 0})
    monkeypatch.setattr(Point, "exact", lambda *_: (torch.full((4, 3), float("nan")), "jvp"))
    with pytest.raises(ReadoutError, match="0 throughout, or not finite"):
        export.to_peft(task, store, tmp_path / "x", asked)


def test_imprints_that_are_all_zero_are_not_exported(tmp_path: Path) -> None:
    data = models.data()
    data["weights"][[0, 3, 6]] = 0
    task = models.task(models.adapted("gpt2"))
    store = simulate(task, data, models.sources(), models.PLAN, progress=False)
    with pytest.raises(ReadoutError, match="every imprint of the chosen sources is zero"):
        export.to_peft(task, store, tmp_path / "x", models.queries(), sources=["site/0"])
