"""Losses, imprints and scores of a language model are those of its texts, however they are batched or padded."""

import logging
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from imprint import DataError, Plan, Reader, Sources, Store, Task, TaskError, attribute, check, self_influence, simulate
from imprint.evaluation import Subsets, evaluate, retrain
from imprint.language import Completions, LanguageTask, task
from tests.language.models import CONTEXT, LABELS, MODELS, TEXTS, VOCABULARY, documents, gemma2, gpt2, llama, tokenizer

PLAN = Plan(steps=2, lr=0.02)


def queries() -> dict[str, Tensor]:
    prompts, completions = ["the cat", "over the sea sails a", "a"], [" sat on", " ship with", " ship"]
    return Completions(prompts, completions, tokenizer()).columns


def widened(columns: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    """The same rows with more padding, of tokens that would matter if they were seen."""
    drawn = torch.randint(VOCABULARY, (len(columns["weights"]), by), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": torch.cat([columns["input_ids"], drawn], 1),
        "weights": F.pad(columns["weights"], (0, by)),
    }


def losses(language: Task, columns: dict[str, Tensor]) -> Tensor:
    functional, theta = language.at(language.state())
    with torch.no_grad(), language.evaluating():
        return functional.losses(theta, columns, len(columns["input_ids"]))


def simulated(language: Task, columns: dict[str, Tensor], plan: Plan = PLAN, **options: Any) -> Store:
    return simulate(language, columns, documents().sources(LABELS), plan, progress=False, **options)


def imprints(store: Store) -> dict[str, Tensor]:
    return store.imprints(0, 0, len(store), torch.device("cpu"))


def scores(language: Task, store: Store, columns: dict[str, Tensor], **options: Any) -> Tensor:
    found: Tensor = attribute(language, store, columns, progress=False, **options).scores
    return found


def close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    largest = max(float(t.abs().max()) for t in left.values())
    assert largest > 0
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("length", [4, 12, CONTEXT])
def test_windows_add_up_to_the_document_where_context_does_not_matter(kind: str, length: int) -> None:
    """Each window sees its own tokens only, so the whole is compared with the same windows run one by one."""
    model, tokens = MODELS[kind]().eval(), tokenizer()
    columns = documents(length=length, loss="sum")
    found = losses(task(model), columns.columns)
    for index, text in enumerate(TEXTS):
        ids = tokens(text)["input_ids"]
        expected = 0.0
        for start in range(0, len(ids) - 1, length - 1):
            window = torch.tensor([ids[start : start + length]])
            with torch.no_grad():  # the model's own loss is the mean over the tokens
                expected += float(model(input_ids=window, labels=window).loss) * (window.shape[1] - 1)
        assert float(found[columns.documents == index].sum()) == pytest.approx(expected, rel=1e-6)


def test_the_mean_is_the_sum_over_the_number_of_tokens() -> None:
    model, mean, total = gpt2(), documents(), documents(loss="sum")
    by_mean, by_sum = losses(task(model), mean.columns), losses(task(model), total.columns)
    for index, text in enumerate(TEXTS):
        own, count = mean.documents == index, len(tokenizer()(text)["input_ids"]) - 1
        assert float(by_mean[own].sum()) * count == pytest.approx(float(by_sum[own].sum()), rel=1e-6)


def test_a_query_is_measured_by_the_log_likelihood_of_its_completion() -> None:
    model, tokens = gpt2().eval(), tokenizer()
    language = task(model, tokens)
    functional, theta = language.at(language.state())
    with torch.no_grad(), language.evaluating():
        measured = functional.measures(theta, queries(), 3)
    ids = tokens("the cat sat on")["input_ids"]
    before = len(tokens("the cat")["input_ids"])
    with torch.no_grad():
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(float(log_probs[t - 1, ids[t]]) for t in range(before, len(ids)))
    assert float(measured[0]) == pytest.approx(expected, rel=1e-12)
    assert (language.measure_name, language.better) == ("log-likelihood", "higher")


def test_padding_of_queries_costs_nothing() -> None:
    language, widths = task(gpt2()), list[int]()
    embedding = language.replica.get_submodule("transformer.wte")
    embedding.register_forward_hook(lambda _, given, out: widths.append(out.shape[1]))
    functional, theta = language.at(language.state())
    columns = widened(queries(), 9)
    with torch.no_grad(), language.evaluating():
        functional.measures(theta, columns, 3)
        language.token_log_probs(language.replica, columns)
    assert set(widths) == {queries()["weights"].shape[1]}


@pytest.mark.parametrize(
    ("kind", "engine", "tolerance"),
    [("gpt2", "tangent", 1e-11), ("gpt2", "trajectories", 1e-11), ("llama", "tangent", 1e-5)],
)
def test_neither_imprints_nor_scores_see_padding_or_batches(kind: str, engine: Any, tolerance: float) -> None:
    """Llama's norms are computed in float32, whatever the model is in."""
    language, columns, plan = task(MODELS[kind]()), documents().columns, Plan(engine=engine, steps=2, lr=0.02)
    store, wide = (simulated(language, data, plan) for data in (columns, widened(columns, 5)))
    close(imprints(store), imprints(wide), tolerance)
    torch.testing.assert_close(losses(language, columns), losses(language, widened(columns, 5)), rtol=tolerance, atol=0)
    together = scores(language, store, queries())
    assert together.abs().min() > 0
    for changed in (
        scores(language, store, widened(queries(), 7)),
        scores(language, store, queries(), batch_size=1),
        torch.cat([scores(language, store, {n: t[i : i + 1] for n, t in queries().items()}) for i in range(3)]),
    ):
        torch.testing.assert_close(changed, together, rtol=1e3 * tolerance, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_attention_is_as_it_was_loaded_before_and_after_and_makes_no_difference(kind: str) -> None:
    found = []
    for attention in ("eager", "sdpa"):
        model = MODELS[kind]()
        model.set_attn_implementation(attention)
        language = task(model)
        store = simulated(language, documents().columns)
        result = attribute(language, store, queries(), progress=False)
        assert result.details["readout"] == "jvp" and "fallback" not in result.details
        assert store.checkpoints[0].measured.one_by_one is None
        assert model.config._attn_implementation == attention
        assert model.training
        found.append(result.scores)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_attention_that_cannot_be_differentiated_is_not_used() -> None:
    def fused(*given: Any, **options: Any) -> Any:
        raise AssertionError("a fused kernel was called")

    ALL_ATTENTION_FUNCTIONS.register("fused_for_a_test", fused)
    model = gpt2()
    model.config._attn_implementation = "fused_for_a_test"
    language = task(model)
    scores(language, simulated(language, documents().columns), queries())
    assert model.config._attn_implementation == "fused_for_a_test"


@pytest.mark.parametrize("kind", MODELS)
def test_half_precision_of_the_computation_leaves_imprints_in_full(kind: str) -> None:
    model = MODELS[kind]().float()
    full, half = task(model), task(model, compute="bfloat16")
    exact = scores(full, simulated(full, documents().columns), queries()).flatten()
    for engine in ("tangent", "trajectories"):
        plan = Plan(engine=engine, steps=2, lr=0.02)
        store = simulated(half, documents().columns, plan)
        assert all(tensor.dtype == torch.float32 for tensor in imprints(store).values())
        for readout in ("jvp", "gradient"):
            result = attribute(half, store, queries(), readout=readout, progress=False)
            assert result.details["readout"] == readout and "fallback" not in result.details
            found = result.scores.flatten()
            assert not torch.equal(found, exact)
            assert float(torch.corrcoef(torch.stack([found, exact]))[0, 1]) > 0.999
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_gauss_newton_sees_the_logits() -> None:
    language = task(gpt2(), parameters="last:1")
    store = simulated(language, documents().columns, Plan(steps=2, lr=0.02, curvature="gauss-newton"))
    assert scores(language, store, queries()).abs().min() > 0


@pytest.mark.parametrize("kind", MODELS)
def test_every_window_can_be_a_source(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    language, columns = task(MODELS[kind](), parameters="last:1"), documents().columns
    sources = Sources.per_example(len(columns["weights"]))
    plan = Plan(engine="spectral", steps=20, directions=6, damping=0.1)
    with caplog.at_level(logging.WARNING, logger="imprint"):
        store = simulate(language, columns, sources, plan, progress=False)
        own = self_influence(language, store, columns, progress=False)
    assert not caplog.text
    torch.testing.assert_close(own, scores(language, store, columns).diagonal(), rtol=1e-4, atol=1e-6)


def test_a_large_vocabulary_takes_no_memory_for_each_source() -> None:
    """Its logits are met once for each query: with those of every source, all would take twice as much."""
    columns = documents().columns
    sources = Sources.per_example(len(columns["weights"]))
    language = task(gpt2(vocab_size=10 * VOCABULARY), parameters="lora:2")
    store = simulate(language, columns, sources, PLAN, progress=False)
    readers = [Reader(language, store, memory=memory) for memory in ("12MB", "5MB", "1B")]
    assert [len(reader.chunks(queries(), 3)) for reader in readers] == [1, 2, len(sources)]
    whole, some, single = (reader.scores(queries(), 3) for reader in readers)
    torch.testing.assert_close(some, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(single, whole, rtol=1e-9, atol=1e-12)


def test_a_regulariser_enters_the_objective() -> None:
    columns, pulls = documents().columns, torch.zeros((), dtype=torch.float64)

    def decay(model: nn.Module) -> Tensor:
        return 0.5 * sum((p.square().sum() for p in model.parameters()), pulls)

    plain, decayed = (task(gpt2(), parameters="last:1", regulariser=r) for r in (None, decay))
    assert decayed.regulariser is decay
    before, after = (imprints(simulated(each, columns, Plan(steps=2, lr=0.1))) for each in (plain, decayed))
    name = "transformer.h.1.ln_1.weight"
    assert not torch.allclose(before[name], after[name], rtol=1e-3)


def test_a_check_says_that_it_will_work() -> None:
    data = documents()
    found = check(task(gpt2(), parameters="lora:2"), data.columns, data.sources(LABELS), PLAN, queries=queries())
    assert found.ok, found.problems
    assert all(each.works for each in found.readouts)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_carry_imprints(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    language = task(model)
    assert ("lm_head.weight" in language.names) == (not tied)
    store = simulated(language, documents().columns)
    by_jvp, by_gradient = (scores(language, store, queries(), readout=kind) for kind in ("jvp", "gradient"))
    torch.testing.assert_close(by_jvp, by_gradient, rtol=1e-4, atol=1e-6)


class _Capped(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return 3 * (self.head(hidden) / 3).tanh()  # type: ignore[no-any-return]


def test_a_head_that_does_more_than_a_matrix_is_computed_in_full(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = gpt2(tie_word_embeddings=False).eval(), tokenizer()
    model.lm_head = _Capped(model.lm_head)
    model.get_output_embeddings = MethodType(lambda self: self.lm_head.head, model)  # what it says is not what it does
    with caplog.at_level(logging.WARNING, logger="imprint"):
        language = task(model, tokens)
    assert "computed for every source, because the model does more to the logits than a matrix" in caplog.text
    functional, theta = language.at(language.state())
    with torch.no_grad(), language.evaluating():
        found = functional.measures(theta, queries(), 3)
        each = language.token_log_probs(language.replica, queries())
        logits = model(input_ids=queries()["input_ids"]).logits
    expected = -F.cross_entropy(logits[:, :-1].transpose(1, 2), queries()["input_ids"][:, 1:], reduction="none")
    torch.testing.assert_close(found, (expected * queries()["weights"][:, 1:]).sum(1))
    counted = queries()["weights"].any(0)
    torch.testing.assert_close(each[:, counted], F.pad(expected, (1, 0))[:, counted])


def test_a_half_precision_model_is_measured_with_weights_in_full() -> None:
    language = task(gpt2().bfloat16())
    batch = {**queries(), "weights": queries()["weights"] / 3}
    functional, theta = language.at(language.state())
    with torch.no_grad(), language.evaluating():
        measured = functional.measures(theta, batch, 3)
        each = language.token_log_probs(language.replica, batch)
    torch.testing.assert_close(measured, (batch["weights"] * each).sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", [torch.float32, torch.float16, torch.bfloat16])
def test_what_the_model_does_to_its_logits_shows_in_every_precision(precision: torch.dtype) -> None:
    assert not task(gemma2().to(precision))._contracts
    assert task(gemma2(final_logit_softcapping=None).to(precision))._contracts
    assert all(task(made().to(precision))._contracts for made in MODELS.values())


def test_tokens_of_another_vocabulary_are_refused_before_the_model_sees_them() -> None:
    columns = documents().columns
    small = gpt2(vocab_size=100)
    with pytest.raises(TaskError, match=r"the tokenizer has \d+ tokens and the model knows 100: is it another model's"):
        task(small, tokenizer())
    with pytest.raises(TaskError, match=r"a token is \d+, and the model knows tokens below 100: .*another token"):
        simulate(task(small), columns, documents().sources(LABELS), PLAN, progress=False)
    language = task(gpt2())
    store = simulated(language, columns)
    wrong = {**queries(), "input_ids": queries()["input_ids"] + VOCABULARY}
    with pytest.raises(TaskError, match="another tokenizer"):
        scores(language, store, wrong)


def test_a_pad_token_that_the_model_does_not_know_does_no_harm() -> None:
    tokens = tokenizer()
    tokens.add_special_tokens({"pad_token": "<pad>"})
    vocabulary = tokens.vocab_size
    assert len(tokens) > vocabulary
    language = task(gpt2(vocab_size=vocabulary), tokens)
    assert losses(language, documents().columns).isfinite().all()


def test_rows_longer_than_the_context_say_by_how_much() -> None:
    long = documents(length=CONTEXT + 3)
    wide = widened(long.columns, CONTEXT + 3 - long.columns["input_ids"].shape[1])
    with pytest.raises(
        TaskError, match=f"of {CONTEXT + 3} tokens are 3 more than the model's context of {CONTEXT}: give"
    ):
        losses(task(gpt2()), wide)


@pytest.mark.parametrize("batch", [(torch.zeros(2, 3), torch.zeros(2)), {"input_ids": torch.zeros(2, 3)}])
def test_other_batches_are_told_what_to_be(batch: Any) -> None:
    with pytest.raises(
        TaskError, match=r"takes the columns input_ids and weights: documents\.columns of language\.Doc"
    ):
        task(gpt2()).loss(gpt2(), batch)


def trainers_batch(**changes: Any) -> dict[str, Any]:
    """Two rows as a Trainer gives them to its model: the second is padded, and its first token is not learnt."""
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask, **changes}


def test_the_loss_of_a_trainers_batch_is_the_sum_over_its_labels() -> None:
    model, batch = gpt2(), trainers_batch()
    model.eval()
    expected = model(**batch, num_items_in_batch=1).loss
    assert losses(task(model), batch).sum().item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": torch.ones(2, 4, dtype=torch.long)}, "are its tokens, or -100; a batch has others"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, "padded on the left"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 0]] * 2)}, "padding is learnt"),
        ({"position_ids": torch.zeros(2, 4, dtype=torch.long)}, "has the column position_ids, which a language task"),
    ],
)
def test_what_else_a_trainers_batch_would_tell_the_model_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        losses(task(gpt2()), trainers_batch(**changes))


@pytest.mark.parametrize("precision", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_models_that_look_ahead_are_refused_in_every_precision(precision: torch.dtype, spread: float) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=1, initializer_range=spread)).to(precision)
    with pytest.raises(TaskError, match="BertForMaskedLM looks ahead"):
        task(bert)


def test_models_that_are_not_causal_are_refused() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(TaskError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        task(t5)
    classifier = GPT2ForSequenceClassification(gpt2(pad_token_id=0).config)
    with pytest.raises(TaskError, match="not logits for each of them"):
        task(classifier)
    for headless in (gpt2().transformer, get_peft_model(llama().model, LoraConfig(target_modules=["down_proj"]))):
        with pytest.raises(TaskError, match=r"(GPT2|Llama)Model gives no logits: .* as AutoModelForCausalLM makes it"):
            task(headless)
    with pytest.raises(TaskError, match="got a Linear: for other models write an"):
        task(nn.Linear(2, 2))


def test_computing_is_in_half_precision_or_as_it_is() -> None:
    compute: Any = "float8"
    with pytest.raises(TaskError, match="compute is None or \"bfloat16\", got 'float8'"):
        task(gpt2(), compute=compute)


def test_it_is_a_task_like_any_other() -> None:
    language = task(gpt2(), tokenizer(), parameters=["transformer.h.*.ln_1.*", "last:1"])
    assert isinstance(language, LanguageTask) and isinstance(language, Task)
    assert "transformer.h.0.ln_1.weight" in language.names
    assert "transformer.h.0.ln_2.weight" not in language.names
    assert "transformer.h.1.ln_2.weight" in language.names


def _trained(subset: Tensor, seed: int) -> Any:
    """A plain model trained for a few steps on some windows."""
    torch.manual_seed(seed)
    model = gpt2()
    optimiser, plain = torch.optim.SGD(model.parameters(), lr=0.1), task(model)
    rows = {name: column[subset] for name, column in documents().columns.items()}
    for _ in range(2):
        optimiser.zero_grad()
        plain.loss(model, rows).mean().backward()
        optimiser.step()
    return model


@pytest.mark.parametrize("measured_by", [None, "lora:2"])
def test_scores_through_an_adapter_are_compared_with_retraining_of_the_plain_model(measured_by: str | None) -> None:
    windows = documents()
    sources = windows.sources(LABELS)
    adapted, measuring = task(gpt2(), parameters="lora:2"), task(gpt2(), parameters=measured_by)
    store = simulate(adapted, windows.columns, sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(adapted, store, queries(), progress=False)
    options: Any = {"data": windows.columns, "progress": False}
    truth = retrain(_trained, measuring, queries(), Subsets.without_each(sources), **options)
    assert [metric.name for metric in evaluate(result, truth)][-1].startswith("slope")
    other = task(llama(), parameters="lora:2")
    wrong = attribute(other, simulate(other, windows.columns, sources, Plan(steps=1), progress=False), queries())
    with pytest.raises(DataError, match="another model or measurement than the ground truth"):
        evaluate(wrong, truth)
