"""Competitors compute what they say they compute, on a tiny Llama with LoRA."""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft", reason="peft is not installed: the extra `language` has it")
pytest.importorskip("kronfluence", reason="kronfluence is not installed: benchmarks/rivals_ekfac.py tells how")

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rivals_bergson
import rivals_ekfac
from rivals_bergson import Checkpoint
from rivals_ekfac import EkFac

pytestmark = pytest.mark.wide
Columns = dict[str, Tensor]
WORDS, LENGTH = 23, 10


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama of two layers with an adapter whose two factors are both away from zero."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, attn_implementation="eager", **sizes))
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.3)
    return adapted.eval()


def rows(count: int, seed: int) -> Columns:
    """Random tokens: a prompt that does not count, then tokens of different weights, then padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    weights = 0.5 + torch.rand(count, LENGTH, generator=generator)
    weights[:, :2] = 0
    for row in range(count):
        weights[row, LENGTH - row % 4 :] = 0
    return {"input_ids": ids * (weights > 0).cummax(1).values, "weights": weights}


TRAIN, QUERIES = rows(21, 1), rows(7, 2)


def adapter(model: nn.Module) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "lora" in name]


def likelihoods(model: Any, columns: Columns) -> Tensor:
    logits = model(input_ids=columns["input_ids"]).logits[:, :-1].log_softmax(-1)
    of_labels: Tensor = logits.gather(2, columns["input_ids"][:, 1:, None]).squeeze(2)
    return (of_labels * columns["weights"][:, 1:]).sum(1)


def gradients(model: Any, columns: Columns) -> list[list[Tensor]]:
    """The gradient of every row's log-likelihood, by parameter of the adapter."""
    each = likelihoods(model, columns)
    return [list(torch.autograd.grad(value, adapter(model), retain_graph=True)) for value in each]


def dot_products(model: Any) -> Tensor:
    queries, train = (
        torch.stack([torch.cat([g.flatten() for g in of_row]) for of_row in gradients(model, columns)])
        for columns in (QUERIES, TRAIN)
    )
    return queries @ train.T


def test_a_huge_damping_leaves_products_of_gradients(model: Any, tmp_path: Path) -> None:
    damping = 1e6
    scores = EkFac(model, TRAIN, folder=tmp_path).score(QUERIES, damping)
    assert scores.shape == (7, 21)
    torch.testing.assert_close(scores * damping * 21, dot_products(model).double(), rtol=1e-3, atol=1e-4)


def test_a_score_is_the_effect_of_a_step_that_weighs_the_example_more(model: Any, tmp_path: Path) -> None:
    """With a huge damping that step is plain descent on the example's loss, taken here for real."""
    scores = EkFac(model, TRAIN, folder=tmp_path).score(QUERIES, 1e6)
    moved = copy.deepcopy(model)
    step = 1e-3
    for parameter, slope in zip(adapter(moved), gradients(model, TRAIN)[0], strict=True):
        parameter.data += step * slope
    with torch.no_grad():
        effect = likelihoods(moved, QUERIES) - likelihoods(model, QUERIES)
    torch.testing.assert_close(scores[:, 0] * 1e6 * 21 * step, effect.double(), rtol=0.05, atol=1e-5)


def test_scores_are_those_of_the_eigenvalue_corrected_kronecker_factors(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the labels that occur instead of drawn ones, factors and scores are computed here by hand."""
    passes = 2  # for the covariances, and for the eigenvalues
    labels = iter([*TRAIN["input_ids"][:, 1:].split(16)] * passes)
    monkeypatch.setattr(rivals_ekfac._LanguageModelling, "_draw", lambda self, logits: next(labels))
    fitted = EkFac(model, TRAIN, folder=tmp_path)
    damping = 0.3 * fitted.mean_eigenvalue
    expected, eigenvalues = by_hand(model, damping)
    assert fitted.mean_eigenvalue == pytest.approx(eigenvalues, rel=1e-3)
    torch.testing.assert_close(fitted.score(QUERIES, damping), expected, rtol=5e-3, atol=5e-3 * float(expected.std()))


def by_hand(model: Any, damping: float) -> tuple[Tensor, float]:
    """EK-FAC from activations and output gradients, a layer at a time, in float64; and the mean eigenvalue."""
    double = copy.deepcopy(model).double()
    layers = {name: layer for name, layer in double.named_modules() if name in rivals_ekfac._adapter_layers(model)}
    train, queries = ({**columns, "weights": columns["weights"].double()} for columns in (TRAIN, QUERIES))
    roots = {**train, "weights": train["weights"].sqrt()}
    inputs, slopes = record(double, layers, roots)
    alive = torch.stack([row.flip(0).cumsum(0).flip(0) for row in train["weights"]])[:, 1:] > 0
    total, values = torch.zeros(7, 21, dtype=torch.float64), []
    of_rows = [gradients(double, columns) for columns in (queries, train, roots)]
    names = [name.removesuffix(".weight") for name, _ in double.named_parameters() if "lora" in name]
    for index, name in enumerate(names):
        a, g = inputs[name][:, :-1][alive], slopes[name][:, :-1][alive]
        right, left = (torch.linalg.eigh(x.T @ x / len(x)).eigenvectors for x in (a, g))
        of_query, of_train, of_root = (
            torch.stack([left.T @ row[index] @ right for row in of_row]) for of_row in of_rows
        )
        eigenvalues = of_root.square().mean(0)
        values.append(eigenvalues.flatten())
        total += torch.einsum("qoi,toi->qt", of_query / (eigenvalues + damping), of_train) / 21
    return total, float(torch.cat(values).mean())


def record(model: Any, layers: dict[str, nn.Module], columns: Columns) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What goes into every layer, and the gradient of the loss with respect to what comes out."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def keep(_: nn.Module, given: tuple[Tensor], out: Tensor, name: str = name) -> None:
            inputs[name], outputs[name] = given[0].detach(), out

        handles.append(layer.register_forward_hook(keep))
    found = torch.autograd.grad(likelihoods(model, columns).sum(), list(outputs.values()))
    for handle in handles:
        handle.remove()
    return inputs, dict(zip(outputs, found, strict=True))


def test_fitting_changes_nothing_of_the_model(model: Any, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learning = [parameter.requires_grad for parameter in model.parameters()]
    fitted = EkFac(model, TRAIN, folder=tmp_path)
    first = fitted.score(QUERIES)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert learning == [parameter.requires_grad for parameter in model.parameters()]
    torch.testing.assert_close(EkFac(model, TRAIN, folder=tmp_path).score(QUERIES), first)


def test_an_untrained_adapter_needs_a_damping(model: Any, tmp_path: Path) -> None:
    """lora_B is zero, so no gradient reaches lora_A, and a share of its mean eigenvalue is nothing."""
    fresh = copy.deepcopy(model)
    for name, parameter in fresh.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    fitted = EkFac(fresh, TRAIN, folder=tmp_path)
    with pytest.raises(ValueError, match="Give a positive damping"):
        fitted.score(QUERIES)
    assert fitted.score(QUERIES, fitted.mean_eigenvalue).isfinite().all()


def test_a_model_without_an_adapter_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a LoRA adapter"):
        EkFac(copy.deepcopy(model).merge_and_unload(), TRAIN, folder=tmp_path)


BERGSON = os.environ.get("BERGSON_PYTHON", "")  # the interpreter of an environment that has bergson
needs_bergson = pytest.mark.skipif(not BERGSON, reason="BERGSON_PYTHON names no interpreter that has bergson")


def even_rows(count: int, seed: int) -> Columns:
    """Rows whose tokens have the same weight: bergson has no others."""
    columns = rows(count, seed)
    counted = (columns["weights"] > 0).float()
    return {**columns, "weights": counted / counted.sum(1, keepdim=True)}


@needs_bergson
def test_two_libraries_agree_on_ekfac(model: Any, tmp_path: Path) -> None:
    """Both draw labels, so they agree as two seeds do; a tenth of the mean eigenvalue is both libraries' damping."""
    train, queries = even_rows(200, 3), even_rows(7, 4)
    ours = EkFac(model, train, folder=tmp_path / "kronfluence").score(queries)
    theirs = rivals_bergson.ekfac(model, train, queries, 0.1, folder=tmp_path / "bergson", python=BERGSON)
    assert_agree(theirs, ours)


@needs_bergson
def test_source_of_a_run_without_end_is_ekfac(model: Any, tmp_path: Path) -> None:
    train, queries = even_rows(200, 3), even_rows(7, 4)
    ours = EkFac(model, train, folder=tmp_path / "kronfluence").score(queries)
    moments = {name: torch.ones_like(p) for name, p in model.named_parameters() if "lora" in name}
    known = ([Checkpoint(model, 5, moments)], train, queries, 0.1)
    theirs = rivals_bergson.source(*known, lr=1e9, folder=tmp_path / "bergson", python=BERGSON)
    assert_agree(theirs, ours)


def assert_agree(found: Tensor, known: Tensor) -> None:
    assert torch.corrcoef(torch.stack([found.flatten(), known.flatten()]))[0, 1] > 0.9
    assert float((found * known).sum() / known.square().sum()) == pytest.approx(1, abs=0.15)


def test_bergson_is_not_given_tokens_of_different_weights(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weighs the tokens of a row equally"):
        rivals_bergson.ekfac(model, TRAIN, QUERIES, 0.1, folder=tmp_path, python="python")


def test_a_failure_inside_bergson_names_its_log(model: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exited with status 1: .*log tells why"):
        rivals_bergson.ekfac(model, even_rows(3, 3), even_rows(2, 4), 0.1, folder=tmp_path, python=sys.executable)
