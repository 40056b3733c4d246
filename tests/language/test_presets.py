"""Adapters that are made for a task mirror and project its steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint import Plan, Recorder, TaskError, attribute, simulate
from imprint.language import LanguageTask, task
from imprint.language.presets import blocks, orthonormal_rows
from tests.language.adapters import QUERIES
from tests.language.models import LABELS, MODELS, documents, gpt2, llama
from tests.language.test_task import close, imprints, losses, scores, simulated
from tests.problems import known


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
