"""Many models trained as one computation are the models a plain loop would have trained."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import PlanError, Task
from imprint.evaluation.training import Recorded, Training, measure_stack, record_together, train_together
from imprint.task import Batch
from tests.evaluation.trainings import (
    ADAM,
    EXAMPLES,
    LABELS,
    PERCEPTRON,
    SEEDS,
    SUBSETS,
    TRAINING,
    After,
    Kind,
    Scaled,
    draw,
)

TRAININGS = {
    "plain": Training(epochs=3, lr=0.1, batch_size=8),
    "momentum": replace(TRAINING, weight_decay=0.0),
    "momentum and weight decay": TRAINING,
    "adam": ADAM,
    "adam with weight decay": replace(ADAM, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": replace(ADAM, optimiser="adamw", weight_decay=0.1),
    "linear": replace(TRAINING, schedule="linear"),
    "cosine": replace(TRAINING, schedule="cosine"),
    "warm-up": replace(TRAINING, warmup=4),
    "warm-up and linear": replace(ADAM, schedule="linear", warmup=3),
    "warm-up and cosine": replace(ADAM, optimiser="adamw", weight_decay=0.1, schedule="cosine", warmup=3),
    "warm-up longer than the training": replace(TRAINING, schedule="cosine", warmup=50),
    "whole batches only": replace(TRAINING, drop_last=True),
    "in order": replace(TRAINING, shuffle=False),
}


class Encoder(nn.Module):
    """A transformer's layer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.layer(self.embedding(tokens)).mean(1))
        return logits


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra `language` is not installed")
    return transformers.GPT2LMHeadModel(  # type: ignore[no-any-return]
        transformers.GPT2Config(
            **{"vocab_size": 7, "n_positions": 5, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            attn_implementation="eager",
            eos_token_id=0,
        )
    ).double()


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra `language` is not installed")
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            **{"vocab_size": 7, "hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 5},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0},
            attn_implementation="eager",
            eos_token_id=0,
        )
    ).double()


def next_tokens(model: nn.Module) -> Task:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0], use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none").mean(1)

    return Task(model, loss=loss)


def dictionaries(model: nn.Module) -> Task:
    return Task(model, loss=lambda m, batch: F.cross_entropy(m(batch["x"]), batch["labels"], reduction="none"))


TOKENS = torch.randint(0, 7, (EXAMPLES, 5), generator=torch.Generator().manual_seed(2))


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    return model


KINDS = {
    "convolutions": Kind(
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)).double(),
        (draw(30, 1, 5, 5), LABELS),
    ),
    "transformer": Kind(lambda: Encoder().double(), (TOKENS, LABELS)),
    "dictionaries": Kind(PERCEPTRON.build, {"x": draw(30, 4), "labels": LABELS}, dictionaries),
    "partly frozen": Kind(partly_frozen, PERCEPTRON.data),
    "constant buffers": Kind(lambda: Scaled().double(), PERCEPTRON.data),
    "gpt-2": Kind(gpt2, (TOKENS,), next_tokens),
    "llama": Kind(llama, (TOKENS,), next_tokens),
}


def assert_same(kind: Kind, training: Training) -> None:
    together = kind.together(SUBSETS, SEEDS, training)
    for index, (subset, seed) in enumerate(zip(SUBSETS, SEEDS, strict=True)):
        model = kind.alone(subset, seed, training)
        alone = kind.task(model).state()
        assert together.keys() == alone.keys()
        for name, parameter in alone.items():
            # absolutely, since Adam makes a step of the rounding where a gradient is zero, as that of a key's bias is
            torch.testing.assert_close(together[name][index], parameter.detach(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
def test_models_trained_together_are_those_trained_alone(training: Training) -> None:
    assert_same(PERCEPTRON, training)


@pytest.mark.filterwarnings("error:.*performance drop")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_any_kind_of_model_can_be_trained_together(kind: Kind) -> None:
    assert_same(kind, TRAINING)
    assert_same(kind, TRAININGS["warm-up and cosine"])


@pytest.mark.parametrize("training", [TRAINING, ADAM], ids=["sgd", "adam"])
def test_a_model_does_not_depend_on_those_trained_beside_it(training: Training) -> None:
    one = PERCEPTRON.together(SUBSETS[1:2], SEEDS[1:2], training)
    many = PERCEPTRON.together(SUBSETS, SEEDS, training)
    others = PERCEPTRON.together([SUBSETS[3], SUBSETS[1], SUBSETS[2], SUBSETS[0]], [7, SEEDS[1], 8, 9], training)
    for name, tensor in many.items():
        torch.testing.assert_close(one[name][0], tensor[1], rtol=1e-10, atol=1e-13)
        assert torch.equal(others[name][1], tensor[1])
        assert not torch.equal(others[name][0], tensor[0])


def test_examples_outside_its_subset_do_not_touch_a_model() -> None:
    x, y = PERCEPTRON.data
    spoilt = Kind(PERCEPTRON.build, (x.index_fill(0, torch.tensor([0, 29]), math.nan), y))
    subsets, seeds = [torch.arange(1, 29), torch.arange(4, 15)], [0, 1]
    clean, dirty = (kind.together(subsets, seeds, TRAINING) for kind in (PERCEPTRON, spoilt))
    for name, tensor in clean.items():
        assert torch.equal(dirty[name], tensor)


def test_measurements_of_a_stack_are_those_of_its_models() -> None:
    x, y = PERCEPTRON.data
    stack = PERCEPTRON.together(SUBSETS, SEEDS, TRAINING)
    losses = measure_stack(Task.classifier(PERCEPTRON.build()), stack, (x, y), len(x))
    model = PERCEPTRON.build()
    model.load_state_dict({name: tensor[1] for name, tensor in stack.items()})
    torch.testing.assert_close(losses[1], F.cross_entropy(model(x), y, reduction="none").detach())


def test_a_measurement_that_vmap_cannot_run_is_taken_of_one_model_after_the_other() -> None:
    def largest(model: nn.Module, batch: Batch) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs.amax(1) if outputs.sum().item() else outputs.amin(1)

    stack = PERCEPTRON.together(SUBSETS, SEEDS, TRAINING)
    x, y = PERCEPTRON.data
    plain, looped = (
        measure_stack(Task.classifier(PERCEPTRON.build(), measure=measure), stack, (x, y), len(x))
        for measure in (lambda model, batch: model(batch[0]).amax(1), largest)
    )
    torch.testing.assert_close(looped, plain)


def test_recorded_epochs_are_states_on_the_way() -> None:
    short = replace(TRAINING, epochs=2)
    whole = train_together(PERCEPTRON.build, Task.classifier, PERCEPTRON.inputs, SUBSETS, SEEDS, TRAINING, record=(2,))
    part = PERCEPTRON.together(SUBSETS, SEEDS, short)
    assert sorted(whole) == [2, 3]
    for name, tensor in part.items():
        assert torch.equal(whole[2][name], tensor)


def recorded(training: Training, steps: tuple[int, ...]) -> dict[int, Recorded]:
    return record_together(PERCEPTRON.build, Task.classifier, PERCEPTRON.inputs, SUBSETS, SEEDS, training, steps)


def test_recorded_steps_are_states_on_the_way_with_the_moments_of_adam() -> None:
    """Of a model whose epochs have as many steps as any, so that it never waits."""
    training = replace(TRAININGS["adam with weight decay"], epochs=2)
    found, after = recorded(training, (1, 3, 8)), dict[int, After]()
    assert sorted(found) == [1, 3, 8]
    model = PERCEPTRON.alone(SUBSETS[0], SEEDS[0], training, after)
    assert after.keys() == set(range(1, 9))
    for step, recorded_then in found.items():
        state, moments = recorded_then.pair(0)
        assert state.keys() == moments.keys() == dict(model.named_parameters()).keys()
        for name, (parameter, second) in after[step].items():
            torch.testing.assert_close(state[name], parameter, rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(moments[name], second / (1 - training.betas[1] ** step), rtol=1e-8, atol=1e-12)


def test_recording_does_not_change_the_training() -> None:
    training = replace(ADAM, epochs=2)
    last = recorded(training, (8,))[8].state
    for name, tensor in PERCEPTRON.together(SUBSETS, SEEDS, training).items():
        assert torch.equal(last[name], tensor)


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(PlanError, match="step 13 cannot be recorded: the training has steps 1 to 12"):
        recorded(ADAM, (1, 13))
    with pytest.raises(PlanError, match="second moments exist for"):
        recorded(TRAINING, (1,))
