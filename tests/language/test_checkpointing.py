"""Blocks that are computed again backwards give the same gradients, at whatever parameters they were computed with."""

from typing import Any

import pytest
import torch

from imprint import Plan, TaskError, attribute
from imprint.language import Completions, task
from tests.language.models import MODELS, documents, gpt2, tokenizer
from tests.language.test_task import close, imprints, simulated
from tests.problems import known

PLAN = Plan(engine="trajectories", steps=3, lr=0.05, epsilon=1.0)


@pytest.mark.parametrize("kind", MODELS)
def test_imprints_are_those_of_a_model_that_keeps_everything(kind: str) -> None:
    """From the second step on, the parameters are not the model's own; dropout stays off though it is recomputed."""
    plain, thrifty = MODELS[kind](), MODELS[kind]()
    thrifty.gradient_checkpointing_enable()
    stores = [simulated(task(model), documents().columns, PLAN) for model in (plain, thrifty)]
    close(imprints(stores[0]), imprints(stores[1]), 1e-10)
    assert "takes plain autograd only" in known(stores[1].checkpoints[0].measured.one_by_one)


def test_blocks_run_twice_for_a_gradient_and_once_for_a_value() -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    language, columns = task(model), documents().columns
    functional, theta = language.at(language.state())
    calls: list[int] = []
    model.transformer.h[0].ln_1.register_forward_pre_hook(lambda *given: calls.append(1))
    with language.evaluating():
        leaves = {name: tensor.requires_grad_() for name, tensor in theta.items()}
        total = functional.losses(leaves, columns, len(columns["weights"])).sum()
        assert len(calls) == 1
        torch.autograd.grad(total, list(leaves.values()))
        assert len(calls) == 2
        with torch.no_grad():
            functional.losses(theta, columns, len(columns["weights"]))
    assert len(calls) == 3


def test_queries_are_read_out_in_forward_mode_all_the_same() -> None:
    model = gpt2()
    store = simulated(task(model), documents().columns, PLAN)
    queries = Completions(["the cat"], [" sat"], tokenizer()).columns
    expected = attribute(task(model), store, queries, progress=False)
    model.gradient_checkpointing_enable()
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    assert any(hooks), "transformers has embeddings require gradients by a hook"
    found = attribute(task(model), store, queries, progress=False)
    assert found.details == expected.details and found.details["readout"] == "jvp"
    torch.testing.assert_close(found.scores, expected.scores)
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_a_library_has_put_there_stays() -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    block: Any = model.transformer.h[0]
    block.forward = own = block.forward
    with task(model).evaluating():
        assert block.forward is own


def test_the_tangent_engine_says_how_to_turn_it_off() -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(TaskError, match=r"model\.gradient_checkpointing_disable\(\) turns it off"):
        simulated(task(model), documents().columns)
    model.gradient_checkpointing_disable()
    simulated(task(model), documents().columns)


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_dropout_along_the_path_is_refused(engine: Any) -> None:
    """What is drawn in the forward pass could not be drawn again in the backward pass."""
    model, plan = gpt2(embd_pdrop=0.0), Plan(engine=engine, steps=1, lr=0.01, dropout=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(
        TaskError, match=r"^the model's gradient checkpointing .* dropout.*gradient_checkpointing_disable"
    ):
        simulated(task(model), documents().columns, plan)
    model.gradient_checkpointing_disable()
    simulated(task(model), documents().columns, plan)


def test_dropout_outside_of_the_blocks_is_drawn_once() -> None:
    plain, thrifty = (gpt2(resid_pdrop=0.0, attn_pdrop=0.0) for _ in range(2))
    thrifty.gradient_checkpointing_enable()
    plan = Plan(engine="trajectories", steps=2, lr=0.05, epsilon=1.0, dropout=True)
    stores = [simulated(task(model), documents().columns, plan) for model in (plain, thrifty)]
    close(imprints(stores[0]), imprints(stores[1]), 1e-10)
