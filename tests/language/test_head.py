"""The contracted head says what plain logits say, in any mode of differentiation, and meets the vocabulary once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import imprint
from imprint import language
from imprint.language.head import log_likelihoods, token_log_probs
from imprint.readout.kernels import forward_only, jvp_scores
from tests.language.models import MODELS, TEXTS, documents, tokenizer

N, LENGTH, WIDTH, VOCABULARY = 2, 3, 4, 7
Measure = Callable[[Tensor], Tensor]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HIDDEN, WEIGHT, BIAS = drawn(N, LENGTH, WIDTH, seed=1), drawn(VOCABULARY, WIDTH, seed=2), drawn(VOCABULARY, seed=3)
TARGETS = torch.tensor([[0, 6, 3], [3, 3, 1]])
WEIGHTS = drawn(N, LENGTH, seed=4)
THETA, DIRECTIONS = drawn(WIDTH, WIDTH, seed=5), drawn(5, WIDTH, WIDTH, seed=6)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def plain_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
    return (weights * plain(hidden, weight, bias, targets)).sum(-1)


def of(function: Any, moving: str) -> Measure:
    """A scalar function of (WIDTH, WIDTH) parameters on which hidden states, weight or bias depend."""

    def measure(theta: Tensor) -> Tensor:
        hidden = (HIDDEN @ theta).tanh() if "h" in moving else HIDDEN
        weight = WEIGHT @ theta if "w" in moving else WEIGHT
        bias = BIAS * theta[0, 0] if "b" in moving else None
        if function in (plain, token_log_probs):
            return (WEIGHTS * function(hidden, weight, bias, TARGETS)).sum()  # type: ignore[no-any-return]
        return function(hidden, weight, bias, TARGETS, WEIGHTS).sum()  # type: ignore[no-any-return]

    return measure


MODES: dict[str, Callable[[Measure], Tensor]] = {
    "value": lambda f: f(THETA),
    "reverse": lambda f: grad(f)(THETA),
    "forward": lambda f: vmap(lambda u: jvp(f, (THETA,), (u,))[1])(DIRECTIONS),
    "values at many": lambda f: vmap(lambda u: f(THETA + u))(DIRECTIONS),
    "forward at many": lambda f: vmap(lambda u: jvp(f, (THETA + u,), (u,))[1])(DIRECTIONS),
    "forward over reverse": lambda f: vmap(lambda u: jvp(grad(f), (THETA,), (u,))[1])(DIRECTIONS),
    "reverse over forward": lambda f: grad(lambda t: jvp(f, (t,), (DIRECTIONS[0],))[1])(THETA),
    "forward twice": lambda f: jvp(lambda t: jvp(f, (t,), (DIRECTIONS[0],))[1], (THETA,), (DIRECTIONS[1],))[1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moving", ["h", "w", "hw", "hwb"])
def test_every_derivative_is_that_of_plain_logits(mode: str, moving: str) -> None:
    expected = MODES[mode](of(plain, moving))
    assert expected.abs().min() > 0
    torch.testing.assert_close(MODES[mode](of(token_log_probs, moving)), expected)
    torch.testing.assert_close(MODES[mode](of(log_likelihoods, moving)), expected)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_weights_are_not_rounded_to_the_precision_of_the_hidden_states(precision: torch.dtype) -> None:
    """Those of a mean over 3 tokens would all be off to the same side."""
    hidden, weight, along = (t.to(precision) for t in (HIDDEN, WEIGHT, drawn(N, LENGTH, WIDTH, seed=7)))
    weights = torch.full((N, LENGTH), 1 / 3)
    each = jvp(lambda h: token_log_probs(h, weight, None, TARGETS), (hidden,), (along,))
    total = jvp(lambda h: log_likelihoods(h, weight, None, TARGETS, weights), (hidden,), (along,))
    for of_tokens, found in zip(each, total, strict=True):
        torch.testing.assert_close(found, (weights * of_tokens).sum(-1), rtol=1e-6, atol=0)


class _Products(TorchDispatchMode):
    """Counts the multiplications with the vocabulary, by all values in them that meet it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.count, self.values = vocabulary, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            if any(self.vocabulary in shape for shape in shapes) or self.vocabulary in result.shape:
                self.count += 1
                self.values += sum(torch.Size(s).numel() for s in (*shapes, tuple(result.shape)))
        return result


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("parameters", ["last:1", "lora:2", "*"])
def test_the_vocabulary_is_met_as_often_for_many_sources_as_for_one(kind: str, parameters: str) -> None:
    task = language.task(MODELS[kind](), parameters=parameters)
    functional, theta = task.at(task.state())
    batch = language.Completions([TEXTS[0]], [" on the sea"], tokenizer()).columns
    met = []
    for sources in (1, 9):
        imprints = {name: drawn(sources, *t.shape, seed=1) for name, t in theta.items()}
        with forward_only(task), _Products(300) as products:
            jvp_scores(lambda at: functional.measures(at, batch, 1), theta, imprints, vectorise=True)
        met.append(products)
    one, many = met
    assert one.count > 0
    if parameters == "*":  # each source brings a head of its own, to be met once, and never by every token
        assert many.count == one.count
        assert many.values < one.values + 9 * 2 * 300 * 8 + 9
    else:
        assert (many.count, many.values) == (one.count, one.values) == (2, one.values)


@pytest.mark.parametrize(
    ("kind", "parameters", "readout"),
    [
        ("gpt2", "*", "jvp"),
        ("gpt2", "*", "central"),
        ("gpt2", "*", "gradient"),
        ("gpt2", "last:1", "jvp"),
        ("gpt2", "lora:2", "jvp"),
        ("llama", "*", "jvp"),
    ],
)
def test_scores_are_those_of_a_head_that_is_not_contracted(kind: str, parameters: str, readout: Any) -> None:
    data = documents()
    contracted, whole = (language.task(MODELS[kind](), parameters=parameters) for _ in range(2))
    assert contracted._contracts
    whole._contracts = False
    plan = imprint.Plan(steps=2, lr=0.01)
    store = imprint.simulate(contracted, data.columns, data.sources(list("abaca")), plan, progress=False)
    queries = language.Completions(["the cat", "over"], [" sat on", " the sea sails"], tokenizer()).columns
    options: dict[str, Any] = {"progress": False, "readout": readout, "step": 1e-3 if readout == "central" else None}
    scores = [imprint.attribute(task, store, queries, **options).scores for task in (contracted, whole)]
    # the norms of Llama are computed in float32, whatever the model is in
    torch.testing.assert_close(*scores, rtol=1e-9 if kind == "gpt2" else 1e-3, atol=1e-9 if kind == "gpt2" else 1e-4)
    assert scores[0].abs().min() > 0


@pytest.mark.parametrize("by_token", [False, True])
def test_the_head_is_not_paid_for_tokens_of_the_prompt(by_token: bool) -> None:
    task = language.task(MODELS["gpt2"]())
    functional, theta = task.at(task.state())
    whole = language.Completions(
        ["over the sea sails a ship with", "a ship over the sea"], [" the", " sail"], tokenizer()
    )
    met = []
    for weights in (whole.columns["weights"], torch.ones_like(whole.columns["weights"])):
        with forward_only(task), _Products(300) as products:
            batch = {**whole.columns, "weights": weights}
            task.token_log_probs(task.model, batch) if by_token else functional.measures(theta, batch, 2)
        met.append(products.values)
    assert met[0] < met[1]
