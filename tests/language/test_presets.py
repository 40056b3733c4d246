"""Adapters made for a task mirror and project its steps; the adapter of a fine-tune carries imprints as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint import Plan, Recorder, StoreError, TaskError, attribute, simulate
from imprint.language import Completions, LanguageTask, task
from imprint.language.presets import adapter_names, blocks, orthonormal_rows
from tests.language.models import LABELS, MODELS, documents, gpt2, llama, tokenizer
from tests.language.test_task import close, imprints, losses, scores, simulated
from tests.problems import known

QUERIES = Completions(["the cat"], [" sat on the mat"], tokenizer()).columns


def fine_tuned(kind: str = "gpt2") -> Any:
    """A model with a LoRA adapter that has been trained, which is to say that B is not 0."""
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "up_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.3, target_modules=targets, fan_in_fan_out=kind == "gpt2")
        model = get_peft_model(MODELS[kind](), config).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_the_last_blocks_are_selected(kind: str) -> None:
    model = MODELS[kind]()
    (_, (name, block)) = blocks(model)
    assert set(task(model, parameters="last:1").names) == {f"{name}.{own}" for own, _ in block.named_parameters()}
    both = task(model, parameters="last:2").names
    assert set(both) == {f"{prefix}.{own}" for prefix, block in blocks(model) for own, _ in block.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_is_made_in_a_twin_that_shares_the_weights(kind: str) -> None:
    model = MODELS[kind]()
    before = dict(model.named_parameters())
    full, adapted = task(model), task(model, parameters="lora:3:last:1")
    assert dict(model.named_parameters()) == before
    assert all(parameter.requires_grad for parameter in before.values())
    held = {id(parameter) for parameter in adapted.model.parameters()}
    assert all(id(parameter) in held for parameter in before.values())
    columns = documents().columns
    assert torch.equal(losses(full, columns), losses(adapted, columns))
    assert adapted.names and all(".1." in name and ".lora_B.imprint" in name for name in adapted.names)
    with torch.no_grad():
        next(iter(before.values())).mul_(2)  # training goes on
    assert torch.equal(losses(full, columns), losses(adapted, columns))


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_sits_where_blocks_lead_out_of_their_wide_inside(kind: str) -> None:
    adapted = task(MODELS[kind](), parameters="lora:2")
    out = {"gpt2": "mlp.c_proj", "llama": "mlp.down_proj"}[kind]
    assert {name.split(".lora_B")[0] for name in adapted.names} == {
        f"{prefix}.{out}" for prefix, _ in blocks(MODELS[kind]())
    }
    for name in adapted.names:
        outputs, rank = adapted.model.get_parameter(name).shape
        inputs = adapted.model.get_parameter(name.replace("lora_B", "lora_A")).shape[1]
        assert inputs > outputs and rank * outputs == 2 * inputs


def test_where_no_layer_is_wider_than_the_model_all_linear_ones_are_adapted(caplog: pytest.LogCaptureFixture) -> None:
    adapted = task(gpt2(n_inner=8), parameters="lora:2")
    assert len(adapted.names) == 2 * 4
    ranks = {
        name.split(".", 3)[-1].split(".lora_B")[0]: adapted.model.get_parameter(name).shape[1] for name in adapted.names
    }
    assert ranks == {"attn.c_attn": 1, "attn.c_proj": 2, "mlp.c_fc": 2, "mlp.c_proj": 2}
    assert "no linear layer of the blocks is wider than the model: the adapter sits on all 8" in caplog.text


def test_models_that_peft_does_not_adapt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(config: Any, model: nn.Module, **named: Any) -> None:
        model.requires_grad_(False)
        raise ValueError("not this one")

    model = gpt2()
    monkeypatch.setattr("peft.inject_adapter_in_model", refuses)
    with pytest.raises(TaskError, match="peft puts no adapter on a GPT2LMHeadModel: ValueError: not this one"):
        task(model, parameters="lora:2")
    assert all(parameter.requires_grad for parameter in model.parameters())
    monkeypatch.setattr("peft.inject_adapter_in_model", lambda *given, **named: None)
    with pytest.raises(
        TaskError, match=r"no adapter on 2 layers of a GPT2LMHeadModel, such as transformer\.h\.0\.mlp\.c_proj"
    ):
        task(gpt2(), parameters="lora:2")


def test_steps_up_and_down_are_exact_mirror_images_of_the_weights() -> None:
    language = task(llama().float(), parameters="lora:2")
    layer: Any = language.model.get_submodule("model.layers.0.mlp.down_proj")
    b = layer.lora_B["imprint"].weight
    assert not b.any()
    step = torch.randn(b.shape)
    moved = []
    for sign in (1, -1):
        b.data.copy_(sign * step)
        moved.append(layer.get_delta_weight("imprint"))
    assert torch.equal(moved[0], -moved[1])
    assert moved[0].any()


def test_what_is_drawn_does_not_depend_on_random_state_or_on_other_layers() -> None:
    def drawn(seed: int, preset: str) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return {name: t for name, t in task(gpt2(), parameters=preset).state().items() if ".lora_A." in name}

    one, other, last = drawn(1, "lora:3"), drawn(2, "lora:3"), drawn(3, "lora:3:last:1")
    assert len(one) == 2 * len(last) > 0
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert all(torch.equal(tensor, one[name]) for name, tensor in last.items())
    assert len({tensor.flatten()[0].item() for tensor in one.values()}) == len(one)
    before = torch.random.get_rng_state()
    for tensor in one.values():
        torch.testing.assert_close(tensor @ tensor.T, torch.eye(len(tensor), dtype=torch.float64))
    orthonormal_rows(2, 5, "anything")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("kind", "tolerance"), [("gpt2", 1e-9), ("llama", 1e-4)])
def test_at_full_rank_the_imprint_is_that_of_the_weights_themselves(kind: str, tolerance: float) -> None:
    """An orthonormal A of full rank projects on everything; layers narrower than the rank have theirs."""
    model, columns = MODELS[kind](), documents().columns
    adapted = task(model, parameters="lora:32")
    names = [f"{name.removesuffix('.lora_B.imprint.weight')}.weight" for name in adapted.names]
    full = task(model, parameters=names)
    plan = Plan(steps=3, lr=0.02)
    of_weights, of_b = simulated(full, columns, plan), simulated(adapted, columns, plan)
    a = {name: adapted.state()[name.replace("lora_B", "lora_A")] for name in adapted.names}
    moved = {}
    for name, b in imprints(of_b).items():
        delta = b @ a[name]  # (sources, out, in)
        plain = f"{name.removesuffix('.lora_B.imprint.weight')}.weight"
        moved[plain] = delta.transpose(1, 2) if kind == "gpt2" else delta  # Conv1D keeps its weight transposed
    close(imprints(of_weights), moved, tolerance)
    torch.testing.assert_close(
        scores(adapted, of_b, QUERIES), scores(full, of_weights, QUERIES), rtol=100 * tolerance, atol=tolerance
    )


def test_checkpoints_of_the_plain_model_serve_a_task_with_an_adapter(tmp_path: Path) -> None:
    model, columns = gpt2(), documents().columns
    later = gpt2()
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(1.1)
    adapted = task(model, parameters="lora:2")
    state = later.state_dict()
    recorder = Recorder(tmp_path)
    recorder(later, 1)  # which keeps tied weights under one of their names
    completed = adapted.complete(load_file(recorder.paths[0]))
    assert all(torch.equal(tensor, completed[name]) for name, tensor in adapted.complete(state).items())
    assert completed.keys() == adapted.state().keys()
    functional, theta = adapted.at(completed)
    with torch.no_grad(), adapted.evaluating():
        found = functional.losses(theta, columns, len(columns["weights"]))
    assert torch.equal(found, losses(task(later), columns))
    store = simulate(
        adapted, columns, documents().sources(LABELS), Plan(steps=1, lr=0.01), checkpoints=[state], progress=False
    )
    assert attribute(adapted, store, QUERIES, progress=False).scores.any()
    assert all(torch.equal(t, adapted.state()[n]) for n, t in adapted.complete(adapted.state()).items())
    with pytest.raises(TaskError, match=r"it lacks transformer\.h\.0\.ln_1\.bias"):
        adapted.complete({name: t for name, t in state.items() if name != "transformer.h.0.ln_1.bias"})
    with pytest.raises(TaskError, match="it has unknown another"):
        adapted.complete({**state, "another": torch.zeros(1)})


@pytest.mark.parametrize("plan", [Plan(engine="spectral", steps=5, lr=0.02, directions=8), Plan(steps=2, lr=1e-3)])
@pytest.mark.parametrize("kind", MODELS)
def test_differences_take_their_step_from_the_model_where_b_is_zero_or_nearly_so(kind: str, plan: Plan) -> None:
    model = MODELS[kind]().float()
    adapted = task(model, parameters="lora:4")
    store = simulated(adapted, documents().columns, plan)
    exact, differences = (scores(adapted, store, QUERIES, readout=readout) for readout in ("jvp", "central"))
    torch.testing.assert_close(differences, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    assert known(store.checkpoints[0].measured.drift) < 1


def test_an_adapter_follows_adam_by_moments_that_are_estimated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those beside a checkpoint are of the model's own parameters, not of an adapter that was made afterwards."""
    model, columns = gpt2(), documents().columns
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = Recorder(tmp_path, optimiser=optimiser)
    for step in (1, 2):
        optimiser.zero_grad()
        task(model).loss(model, columns).mean().backward()
        optimiser.step()
        recorder(model, step)
    adapted = task(model, parameters="lora:4:last:1")
    plan = Plan(steps=3, lr=1e-3, preconditioner="adam")
    options: Any = {"checkpoints": recorder.paths, "progress": False}
    store = simulate(adapted, columns, documents().sources(LABELS), plan, **options)
    assert [checkpoint.measured.moments for checkpoint in store.checkpoints] == ["estimated", "estimated"]
    assert caplog.text.count("has no second moments of parameter 'transformer.h.1.") == 1
    exact, differences = (scores(adapted, store, QUERIES, readout=readout) for readout in ("jvp", "central"))
    assert exact.any()
    torch.testing.assert_close(differences, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    of_weights = task(model, parameters="last:1")
    recorded = simulate(of_weights, columns, documents().sources(LABELS), plan, **options)
    assert [checkpoint.measured.moments for checkpoint in recorded.checkpoints] == ["recorded", "recorded"]


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


@pytest.mark.parametrize(
    "preset", ["last", "last:0", "last:", "last:two", "lora", "lora:x", "lora:0", "lora:2:", "lora:2:last:", "lora:"]
)
def test_presets_that_mean_nothing_are_refused(preset: str) -> None:
    with pytest.raises(TaskError, match=f"parameters='{preset}' is not understood: .last:K. are .*, .lora:R. is"):
        task(gpt2(), parameters=preset)


def test_presets_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(TaskError, match="the last 3 blocks are asked for, and the model has 2"):
        task(gpt2(), parameters="last:3")
    with pytest.raises(TaskError, match="parameters='lora:2' stands alone"):
        task(gpt2(), parameters=["lora:2", "last:1"])
    odd = gpt2()
    odd.config.n_layer = 7
    with pytest.raises(
        TaskError, match=r"GPT2LMHeadModel has no blocks that could be recognised: .* num_hidden_layers .* \(7\)"
    ):
        task(odd, parameters="last:1")
    with pytest.raises(TaskError, match="matches no trainable parameter"):
        task(gpt2(), parameters="encoder.*")


def test_a_half_precision_model_has_its_adapter_in_full() -> None:
    language: LanguageTask = task(llama().bfloat16(), parameters="lora:2")
    assert {language.model.get_parameter(name).dtype for name in language.names} == {torch.float32}
    assert losses(language, documents().columns).dtype == torch.float32
