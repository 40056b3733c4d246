"""The adapter of a fine-tune carries imprints as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from imprint import Plan, StoreError, TaskError, attribute, simulate
from imprint.language import LanguageTask, task
from imprint.language.presets import adapter_names
from tests.language.adapters import QUERIES, fine_tuned
from tests.language.models import LABELS, MODELS, documents, gpt2
from tests.language.test_task import close, imprints, scores, simulated


@pytest.mark.parametrize("kind", MODELS)
def test_a_fine_tune_is_attributed_through_its_own_adapter(kind: str) -> None:
    model = fine_tuned(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    language = task(model)
    assert language.model is model
    assert set(language.names) == trained == set(adapter_names(model))
    store = simulated(language, documents().columns)
    assert scores(language, store, QUERIES).abs().min() > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    last = task(model, parameters="last:1")
    assert set(last.names) == {name for name in trained if ".1." in name}


def test_a_fine_tune_loaded_for_inference_is_the_same(tmp_path: Path) -> None:
    model = fine_tuned()
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(gpt2(), str(tmp_path)).double()
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    stores = [simulated(task(each), documents().columns) for each in (model, loaded)]
    # peft writes what it was given as float32
    close(imprints(stores[0]), imprints(stores[1]), 1e-5)
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == set(adapter_names(loaded))
    merged = fine_tuned()
    merged.merge_adapter()
    with pytest.raises(TaskError, match=r"is merged into the weights and no longer moves them: model\.unmerge_adapter"):
        task(merged)
    merged.unmerge_adapter()
    assert task(merged).names


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("engine", ["tangent", "spectral"])
def test_a_store_of_a_fine_tune_keeps_the_adapter_and_not_the_model_under_it(kind: str, engine: Any) -> None:
    plan = Plan(engine=engine, curvature="gauss-newton", steps=1, lr=0.01)
    first, then = (fine_tuned(kind) for _ in range(2))
    adapters = [{n: (1 + k) * t for n, t in get_peft_model_state_dict(first).items()} for k in range(2)]
    given = (documents().columns, documents().sources(LABELS), plan)
    store = simulate(task(first), *given, checkpoints=adapters, progress=False)
    for checkpoint in range(2):
        assert set(store.base(checkpoint, torch.device("cpu"))) == set(adapter_names(first))
    other = fine_tuned(kind)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    states = [task(first).complete(adapter) for adapter in adapters]  # which share nothing with that model
    whole = simulate(task(other), *given, checkpoints=states, progress=False)
    assert set(whole.base(0, torch.device("cpu"))) == set(states[0]) and not whole.manifest.fixed
    assert store.bytes < whole.bytes / 2
    torch.testing.assert_close(scores(task(then), store, QUERIES), scores(task(other), whole, QUERIES))


def test_what_one_checkpoint_has_of_its_own_is_kept() -> None:
    """As the biases that a fine-tune with bias="all" trains, in a model that was loaded for inference."""
    language = task(fine_tuned())
    moved = next(name for name in language.fixed if name.endswith("c_attn.base_layer.bias"))
    states = [language.state(), {**language.state(), moved: language.state()[moved] + 1}]
    given = (documents().columns, documents().sources(LABELS), Plan(steps=1, lr=0.01))
    store = simulate(language, *given, checkpoints=states, progress=False)
    assert set(store.base(0, torch.device("cpu"))) == {*adapter_names(language.model), moved}
    assert torch.equal(store.state(1, language)[moved], states[1][moved])
    assert moved not in store.manifest.fixed and len(store.manifest.fixed) == len(language.fixed) - 1


@pytest.mark.parametrize("kind", MODELS)
def test_a_store_of_a_fine_tune_is_not_read_on_another_base_model(kind: str) -> None:
    store, other = simulated(task(fine_tuned(kind)), documents().columns), fine_tuned(kind)
    expected, changed = scores(task(other), store, QUERIES), task(other).fixed[-1]
    other.get_parameter(changed).data += 0.001  # after it was recognised
    with pytest.raises(StoreError, match=f"made with another base model: '{changed}' has other values"):
        attribute(task(other), store, QUERIES)
    other.get_parameter(changed).data -= 0.001
    assert torch.equal(scores(task(fine_tuned(kind)), store, QUERIES), expected)
    two = fine_tuned(kind)
    two.add_adapter("other", two.peft_config["default"])
    with pytest.raises(
        StoreError, match=r"made with another base model: this one has no parameter '.*\.other\.weight'"
    ):
        attribute(task(fine_tuned(kind)), simulated(task(two), documents().columns), QUERIES)


def test_a_task_whose_adapter_is_merged_meanwhile_is_refused() -> None:
    model = fine_tuned()
    language = task(model)
    store = simulated(language, documents().columns)
    assert scores(language, store, QUERIES).any()
    model.merge_adapter()
    with pytest.raises(StoreError, match="made with another base model"):
        attribute(language, store, QUERIES)


def test_a_simulation_goes_on_with_the_same_frozen_parameters_only(tmp_path: Path) -> None:
    first, other = task(fine_tuned()), task(fine_tuned())
    other.model.get_parameter(other.fixed[-1]).data += 0.001
    given = (documents().columns, documents().sources(LABELS), Plan(steps=1, lr=0.01))
    states = [
        first.state(),
        {name: 2 * tensor if name in first.names else tensor for name, tensor in first.state().items()},
    ]

    def made(language: LanguageTask, stop: bool = False) -> Any:
        def seen(done: int, total: int) -> None:
            if stop and done > total // 2:
                raise KeyboardInterrupt

        return simulate(language, *given, checkpoints=states, out=tmp_path / "store", progress=seen)

    with pytest.raises(KeyboardInterrupt):
        made(first, stop=True)
    for _ in range(2):  # unfinished, and finished
        with pytest.raises(
            StoreError, match="the frozen parameters that the model shares with all checkpoints changed"
        ):
            made(other)
        assert scores(first, made(first), QUERIES).any()


def test_the_adapters_own_files_are_checkpoints_of_a_fine_tune(tmp_path: Path) -> None:
    model = fine_tuned()
    language = task(model)
    alone = {name: tensor * 2 for name, tensor in get_peft_model_state_dict(model).items()}
    assert not set(alone) & set(language.names)
    completed = language.complete(alone)
    for name, tensor in language.state().items():
        assert torch.equal(completed[name], 2 * tensor if name in language.names else tensor)
    model.save_pretrained(str(tmp_path))
    store = simulate(
        *(language, documents().columns, documents().sources(LABELS), Plan(steps=1, lr=0.01)),
        checkpoints=[tmp_path / "adapter_model.safetensors"],
        progress=False,
    )
    assert scores(language, store, QUERIES).any()
    lacking = dict(list(alone.items())[1:])
    with pytest.raises(TaskError, match="a checkpoint does not fit the model: it lacks"):
        language.complete(lacking)
    wrong = {name: tensor[:1] for name, tensor in alone.items()}
    with pytest.raises(TaskError, match=r"lora_[AB]\.default\.weight' has shape"):
        language.complete(wrong)


def test_a_dora_adapter_is_read_as_peft_writes_it(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)
    model = get_peft_model(gpt2(), config)
    model.save_pretrained(str(tmp_path))
    language = task(model)
    completed = language.complete(load_file(tmp_path / "adapter_model.safetensors"))
    assert all(torch.allclose(tensor, completed[name]) for name, tensor in language.state().items())


def test_an_incomplete_adapter_is_refused_by_what_it_lacks_itself() -> None:
    model = fine_tuned()
    language, written = task(model), get_peft_model_state_dict(model)
    name = next(iter(written))
    del written[name]
    own = name.replace(".weight", ".default.weight")
    with pytest.raises(TaskError, match=rf"it lacks 1 of the adapter's {len(language.names)} tensors: {own}\.$"):
        language.complete(written)


def test_a_disabled_adapter_is_refused() -> None:
    model = fine_tuned()
    model.disable_adapter_layers()
    with pytest.raises(
        TaskError, match=r"is disabled and does not move .*: model\.enable_adapter_layers\(\) turns it on"
    ):
        task(model)
    model.enable_adapter_layers()
    assert task(model).names


def test_an_adapter_on_the_head_is_computed_in_full(caplog: pytest.LogCaptureFixture) -> None:
    config = LoraConfig(r=2, target_modules=["lm_head", "c_attn"], fan_in_fan_out=True)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        model = get_peft_model(gpt2(tie_word_embeddings=False), config).double()
    language = task(model)
    assert not language._contracts
    assert "computed for every source, because it has an adapter" in caplog.text
    store = simulated(language, documents().columns)
    by_jvp, by_gradient = (scores(language, store, QUERIES, readout=kind) for kind in ("jvp", "gradient"))
    torch.testing.assert_close(by_jvp, by_gradient)
    assert by_jvp.any()


def test_one_adapter_is_enough() -> None:
    with pytest.raises(TaskError, match="the model has an adapter of its own, and lora:R would add a second"):
        task(fine_tuned(), parameters="lora:2")
