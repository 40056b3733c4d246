"""Many models trained as one computation are the models a plain loop would have trained."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import DataError, PlanError, Task, TaskError
from imprint.data import Data
from imprint.evaluation.training import (
    Recorded,
    Training,
    measure_stack,
    models_at_once,
    record_together,
    train_together,
)
from imprint.task import Batch, Parameters

CPU = torch.device("cpu")
EXAMPLES = 30
SUBSETS = [torch.arange(30), torch.arange(30)[torch.arange(30) % 3 != 0], torch.arange(5, 30), torch.arange(9)]
SEEDS = [3, 4, 5, 6]
TRAINING = Training(epochs=3, lr=0.1, batch_size=8, momentum=0.9, weight_decay=1e-2)
ADAM = Training(epochs=3, lr=0.01, batch_size=8, optimiser="adam")
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


After = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kind:
    """A kind of model, with data for it."""

    build: Callable[[], nn.Module]
    data: Batch
    task: Callable[[nn.Module], Task] = Task.classifier

    @property
    def inputs(self) -> Data:
        return Data(self.data, device=CPU)

    def together(self, subsets: list[Tensor], seeds: list[int], training: Training, **options: Any) -> Parameters:
        return train_together(self.build, self.task, self.inputs, subsets, seeds, training, **options)[training.epochs]

    def alone(self, subset: Tensor, seed: int, training: Training, after: dict[int, After] | None = None) -> nn.Module:
        """The same training with torch's own optimisers, one model at a time.

        after: takes parameters and second moments as they are after each step.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build().train()
        task, inputs = self.task(model), self.inputs
        optimiser, schedule = optimiser_of(model, training, training.epochs * training.steps(len(subset)))
        order = torch.Generator().manual_seed(seed)
        for _ in range(training.epochs):
            chosen = subset[torch.randperm(len(subset), generator=order)] if training.shuffle else subset
            for batch in chosen.split(training.batch_size):
                if training.drop_last and len(batch) < training.batch_size:
                    continue
                optimiser.zero_grad()
                task.loss(model, inputs.gather(batch)).mean().backward()
                optimiser.step()
                schedule.step()
                if after is not None:
                    after[len(after) + 1] = {
                        name: (p.detach().clone(), optimiser.state[p]["exp_avg_sq"].clone())
                        for name, p in model.named_parameters()
                    }
        return model


def optimiser_of(
    model: nn.Module, training: Training, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimiser: torch.optim.Optimizer
    if training.optimiser == "sgd":
        optimiser = torch.optim.SGD(
            model.parameters(), training.lr, training.momentum, weight_decay=training.weight_decay
        )
    else:
        adam = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
        optimiser = adam(model.parameters(), training.lr, training.betas, weight_decay=training.weight_decay)

    def factor(step: int) -> float:
        growth = min(1.0, (step + 1) / training.warmup) if training.warmup else 1.0
        share = min(1.0, max(0.0, (step - training.warmup) / max(1, steps - training.warmup)))
        falls = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
        return growth * falls[training.schedule]

    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, factor)


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


class Scaled(nn.Module):
    """Has a buffer that nothing changes, unless `counting`, and one that is not saved."""

    scale: Tensor
    shift: Tensor

    def __init__(self, *, drawn: bool = False, counting: bool = False) -> None:
        super().__init__()
        self.inner, self.counting = nn.Linear(4, 3), counting
        self.register_buffer("scale", torch.rand(4) if drawn else torch.arange(1.0, 5.0))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.counting and self.training:
            self.shift.mul_(0.9)
        logits: Tensor = self.inner(x * self.scale + self.shift)
        return logits


def dictionaries(model: nn.Module) -> Task:
    return Task(model, loss=lambda m, batch: F.cross_entropy(m(batch["x"]), batch["labels"], reduction="none"))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


LABELS = torch.randint(0, 3, (EXAMPLES,), generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 7, (EXAMPLES, 5), generator=torch.Generator().manual_seed(2))


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    return model


PERCEPTRON = Kind(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), (draw(30, 4), LABELS))
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
MOVING = {
    "changed by training": lambda: Scaled(counting=True).double(),
    "drawn by the seed": lambda: Scaled(drawn=True).double(),
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


def test_another_order_gives_another_model_of_the_same_initialisation() -> None:
    weight, again = (
        PERCEPTRON.together(SUBSETS[:1] * 2, [3, 3], TRAINING, orders=orders)["0.weight"] for orders in ([1, 2], [1, 1])
    )
    assert not torch.allclose(weight[0], weight[1])
    torch.testing.assert_close(again[0], again[1])


def test_the_same_seeds_give_the_same_models() -> None:
    first, again = (dropping().together(SUBSETS, SEEDS, TRAINING) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor)


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    dropping().together(SUBSETS, SEEDS, TRAINING)
    models_at_once(dropping().build, Task.classifier, dropping().inputs, TRAINING)
    assert torch.equal(torch.get_rng_state(), before)


def dropping(p: float = 0.5) -> Kind:
    """Models that start from the same weights whatever the seed, so that only their dropout can differ."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3)).double()
        for number, parameter in enumerate(model.parameters()):
            start = torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).sin()
            parameter.data = start.reshape(parameter.shape) / (number + 1)
        return model

    return Kind(build, PERCEPTRON.data)


def trained_weight(p: float, seeds: list[int]) -> Tensor:
    return dropping(p).together([torch.arange(30)] * 2, seeds, TRAINING, orders=[0, 0])["3.weight"]


def test_models_of_different_seeds_draw_different_dropout() -> None:
    dropped, whole = trained_weight(0.5, [1, 2]), trained_weight(0.0, [1, 2])
    torch.testing.assert_close(whole[0], whole[1])
    assert float((dropped[0] - dropped[1]).abs().max()) > 1e-3


def test_models_of_different_seeds_draw_different_dropout_also_in_different_groups() -> None:
    """As runs of a removal do, each of which is a group that shares its dropout."""

    def alone(seed: int) -> Tensor:
        return dropping().together([torch.arange(30)], [seed], TRAINING, orders=[0])["3.weight"]

    assert torch.equal(alone(1), alone(1))
    assert float((alone(1) - alone(2)).abs().max()) > 1e-3


def test_models_of_one_seed_share_their_dropout() -> None:
    dropped, whole = trained_weight(0.5, [1, 1]), trained_weight(0.0, [1, 1])
    torch.testing.assert_close(dropped[0], dropped[1])
    assert float((dropped[0] - whole[0]).abs().max()) > 1e-3  # and they do have some


def test_dropout_does_not_repeat_the_random_numbers_of_the_initialisation() -> None:
    """The first mask of a model is not the one that its seed would draw first."""

    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shown = nn.Parameter(torch.zeros(64, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (F.dropout(torch.ones_like(self.shown), 0.5) * self.shown).sum() + 0 * x[:, 0]

    def task(model: nn.Module) -> Task:
        return Task(model, loss=lambda m, batch: m(batch[0]))

    once = Training(epochs=1, lr=1.0, batch_size=EXAMPLES)
    first = Kind(Mask, PERCEPTRON.data, task).together([torch.arange(EXAMPLES)], [5], once)["shown"][0] != 0
    with torch.random.fork_rng():
        torch.manual_seed(5)
        own = F.dropout(torch.ones(64, dtype=torch.float64), 0.5) != 0
    assert 10 < int(first.sum()) < 54
    assert 10 < int((first ^ own).sum()) < 54


def test_dropout_of_models_trained_together_has_the_distribution_of_models_trained_alone() -> None:
    """Of 400 models each, that differ by their dropout only: means and variances of logits, in standard errors."""
    models, kind, everything = 400, dropping(), torch.arange(EXAMPLES)
    training = Training(epochs=2, lr=0.2, batch_size=8, momentum=0.9, shuffle=False)
    stack = kind.together([everything] * models, list(range(models)), training)
    queries = (kind.data[0][:2].repeat_interleave(3, 0), torch.arange(3).repeat(2))
    task = Task.classifier(kind.build(), measure="logit")
    together = measure_stack(task, stack, queries, 6)
    torch.manual_seed(12345)
    rows = []
    for _ in range(models):
        model = kind.build().train()
        optimiser = torch.optim.SGD(model.parameters(), training.lr, training.momentum)
        for _ in range(training.epochs):
            for batch in everything.split(training.batch_size):
                optimiser.zero_grad()
                F.cross_entropy(model(kind.data[0][batch]), kind.data[1][batch]).backward()
                optimiser.step()
        with torch.no_grad():
            rows.append(task.measure(model.eval(), queries))
    alone = torch.stack(rows)
    assert float(alone.var(0).min()) > 1e-4  # dropout matters here
    for power in (1, 2):  # means, then variances
        ours, theirs = ((values - (power - 1) * values.mean(0)) ** power for values in (together, alone))
        error = ((ours.var(0) + theirs.var(0)) / models).sqrt()
        assert float(((ours.mean(0) - theirs.mean(0)) / error).abs().max()) < 4


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6, affine=False)],
    ids=["statistics", "no statistics", "no weights"],
)
def test_models_with_batch_norm_are_refused(layer: nn.Module) -> None:
    kind = Kind(lambda: nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 3)).double(), PERCEPTRON.data)
    with pytest.raises(TaskError, match=r"batch norm.*train\(subset, seed\)"):
        kind.together(SUBSETS, SEEDS, TRAINING)
    with pytest.raises(TaskError, match="batch norm"):
        models_at_once(kind.build, kind.task, kind.inputs, TRAINING)


@pytest.mark.parametrize("build", MOVING.values(), ids=MOVING.keys())
def test_models_with_buffers_that_are_not_constant_are_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(TaskError, match=r"buffers that depend on training or on the seed.*train\(subset, seed\)"):
        Kind(build, PERCEPTRON.data).together(SUBSETS, SEEDS, TRAINING)


def test_models_that_vmap_cannot_run_are_refused_with_the_reason() -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        values = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return values if values.sum().item() > 0 else -values

    kind = Kind(PERCEPTRON.build, PERCEPTRON.data, lambda model: Task(model, losses))
    with pytest.raises(TaskError, match=r"cannot be trained together.*RuntimeError.*train\(subset, seed\)"):
        kind.together(SUBSETS, SEEDS, TRAINING)


def at_once(width: int, memory: str) -> int:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    inputs = Data((draw(30, 4).float(), LABELS), device=CPU)
    return models_at_once(build, Task.classifier, inputs, TRAINING, memory)


def test_more_memory_and_smaller_models_let_more_train_at_once() -> None:
    assert at_once(100, "1kB") == 1
    assert 1 < at_once(100, "1MB") < at_once(100, "4MB")
    assert at_once(1000, "4MB") < at_once(100, "4MB")
    assert at_once(10**6, "1TB") == 1  # one alone is more than the caches of a CPU hold


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "optimiser": ({"optimiser": "Adam"}, "optimiser 'Adam' is unknown: use one of sgd, adam, adamw"),
    "schedule": ({"schedule": "step"}, "schedule 'step' is unknown"),
    "epochs": ({"epochs": 0}, "epochs must be at least 1, got 0"),
    "batch size": ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    "step size": ({"lr": math.nan}, "lr must be at least 0, got nan"),
    "momentum": ({"optimiser": "adam", "momentum": 0.9}, "momentum= works with \"sgd\" only; 'adam' has betas"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Training(**{"epochs": 1, "lr": 0.1, **change})


def test_a_subset_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(DataError, match="a subset of 9 examples is smaller than one batch of 10"):
        PERCEPTRON.together(SUBSETS, SEEDS, replace(TRAINING, batch_size=10, drop_last=True))


def test_every_subset_needs_its_seed() -> None:
    with pytest.raises(DataError, match="got 4 subsets and 3 seeds"):
        PERCEPTRON.together(SUBSETS, SEEDS[:3], TRAINING)
