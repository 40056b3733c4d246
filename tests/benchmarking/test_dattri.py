"""Imprints inside dattri: its metrics run on them unchanged, and they agree with its own influence functions."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset, default_collate

from imprint import DataError, MissingExtra, Plan

pytest.importorskip("dattri", reason="dattri is not installed: the extra `bench` has it")

from dattri.algorithm.influence_function import IFAttributorExplicit
from dattri.metric import lds, loo_corr, mislabel_detection_auc
from dattri.task import AttributionTask

from imprint.benchmarking.dattri import ImprintAttributor

N, QUERIES, DECAY = 60, 12, 0.05
LONG = Plan(steps=150, lr=1.0)  # (1 − 0.05)¹⁵⁰ < 0.001: as good as for ever
Columns = tuple[Tensor, Tensor]


def blobs(count: int, seed: int) -> Columns:
    """Three overlapping classes of points."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + nn.functional.one_hot(y, 4), y


def loader(columns: Columns, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*columns), batch_size=len(columns[1]), **options)


TRAIN, TEST = blobs(N, 0), blobs(QUERIES, 1)


def converged(columns: Columns) -> nn.Module:
    """Softmax regression with weight decay at its optimum, which does not depend on where it started."""
    model = nn.Linear(4, 3)
    optimiser = torch.optim.LBFGS(model.parameters(), 1.0, 200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")
    x, y = columns

    def objective() -> Tensor:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(model(x), y) + penalty(dict(model.named_parameters()))
        value.backward()
        return value

    optimiser.step(objective)
    return model


def penalty(parameters: dict[str, Tensor]) -> Tensor:
    return DECAY / 2 * torch.stack([p.square().sum() for p in parameters.values()]).sum()


def task_of(model: nn.Module, checkpoints: Any = None, decay: bool = True, **options: Any) -> AttributionTask:
    """As dattri's influence functions want it; the weight decay belongs to the loss that was trained on."""

    def loss(parameters: dict[str, Tensor], batch: Columns) -> Tensor:
        x, y = batch
        value = nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)
        return value + penalty(parameters) if decay else value

    given = checkpoints or {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return AttributionTask(loss_func=loss, model=model, checkpoints=given, **options)


def loss_of(model: nn.Module, columns: Columns) -> Tensor:
    return nn.functional.cross_entropy(model(columns[0]), columns[1], reduction="none").detach()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return converged(TRAIN)


@pytest.fixture(scope="module")
def scores(model: nn.Module) -> Tensor:
    attributor = ImprintAttributor(task_of(model), LONG)
    with torch.no_grad():  # as dattri's scripts do
        attributor.cache(loader(TRAIN))
        result: Tensor = attributor.attribute(loader(TRAIN), loader(TEST))
    return result


def test_scores_are_training_examples_by_queries(scores: Tensor) -> None:
    assert scores.shape == (N, QUERIES)
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    assert scores.isfinite().all()


def test_scores_are_those_of_the_explicit_influence_function(model: nn.Module, scores: Tensor) -> None:
    explicit = IFAttributorExplicit(task=task_of(model))
    explicit.cache(loader(TRAIN))
    theirs = explicit.attribute(loader(TRAIN), loader(TEST)).detach()
    together = torch.corrcoef(torch.stack([scores.flatten(), theirs.flatten()]))[0, 1]
    assert float(together) > 0.999
    for ours, other in zip(scores.T, theirs.T, strict=True):
        assert float(torch.corrcoef(torch.stack([ours, other]))[0, 1]) > 0.95
    assert float(scores.norm() / theirs.norm()) == pytest.approx(1, abs=0.05)


def test_their_leave_one_out_runs_unchanged_on_our_scores_and_finds_them_right(scores: Tensor) -> None:
    without = [torch.arange(N) != i for i in range(N)]
    values = torch.stack([loss_of(converged((TRAIN[0][kept], TRAIN[1][kept])), TEST) for kept in without])
    correlation, _ = loo_corr(scores, (values, torch.arange(N)))
    assert correlation.shape == (QUERIES,)
    assert float(correlation.min()) > 0.9


def test_their_datamodelling_score_runs_unchanged_on_our_scores_and_finds_them_right(scores: Tensor) -> None:
    halves = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(i))[: N // 2] for i in range(25)])
    values = torch.stack([loss_of(converged((TRAIN[0][half], TRAIN[1][half])), TEST) for half in halves])
    correlation, _ = lds(scores, (-values, halves))
    assert correlation.shape == (QUERIES,)
    assert float(correlation.mean()) > 0.7


def test_a_positive_score_means_that_the_example_helps(model: nn.Module, scores: Tensor) -> None:
    before = loss_of(model, TEST)
    for query in range(3):
        best, worst = int(scores[:, query].argmax()), int(scores[:, query].argmin())
        assert scores[best, query] > 0 > scores[worst, query]
        for example, sign in ((best, 1), (worst, -1)):
            kept = torch.arange(N) != example
            after = loss_of(converged((TRAIN[0][kept], TRAIN[1][kept])), TEST)
            assert float(after[query] - before[query]) * sign > 0  # without it the loss is higher, or lower


def test_wrong_labels_have_the_largest_influence_on_themselves() -> None:
    x, y = blobs(N, 3)
    x = 3 * nn.functional.one_hot(y, 4) + 0.3 * (x - nn.functional.one_hot(y, 4))  # classes that lie apart
    wrong = torch.arange(N) < 5
    data = (x, torch.where(wrong, (y + 1) % 3, y))
    itself = ImprintAttributor(task_of(converged(data)), LONG).attribute(loader(data), loader(data)).diag()
    assert set(itself.topk(5).indices.tolist()) == set(range(5))
    area, _ = mislabel_detection_auc(itself, wrong)
    assert float(area) == pytest.approx(1.0)


def test_several_checkpoints_give_the_mean_of_their_scores(model: nn.Module) -> None:
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    early = {name: 0.5 * tensor for name, tensor in last.items()}
    plan = Plan(steps=20, lr=0.5)

    def attributed(checkpoints: list[dict[str, Tensor]]) -> Tensor:
        task = task_of(nn.Linear(4, 3), checkpoints)
        return ImprintAttributor(task, plan).attribute(loader(TRAIN), loader(TEST))

    both, first, second = attributed([early, last]), attributed([early]), attributed([last])
    assert not torch.allclose(first, second, rtol=1e-2)
    torch.testing.assert_close(both, (first + second) / 2, rtol=1e-4, atol=1e-5)


def test_checkpoints_may_be_files(model: nn.Module, tmp_path: Path, scores: Tensor) -> None:
    torch.save(model.state_dict(), tmp_path / "model.pt")
    task = task_of(nn.Linear(4, 3), str(tmp_path / "model.pt"))
    torch.testing.assert_close(ImprintAttributor(task, LONG).attribute(loader(TRAIN), loader(TEST)), scores)


def test_other_attributors_of_the_same_task_are_not_disturbed(model: nn.Module) -> None:
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoints = [{name: 0.5 * tensor for name, tensor in last.items()}, last]
    task = task_of(nn.Linear(4, 3), checkpoints)
    first, _ = task.get_param(ckpt_idx=0)
    first = first.detach().clone()
    ImprintAttributor(task, Plan(steps=5, lr=0.5)).cache(loader(TRAIN))
    again, _ = task.get_param(ckpt_idx=0)
    assert torch.equal(again, first)


def test_a_target_of_its_own_is_what_is_attributed(model: nn.Module) -> None:
    def target(parameters: dict[str, Tensor], batch: Columns) -> Tensor:
        x, y = batch
        return -2 * nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)

    plan = Plan(steps=20, lr=0.5)
    plain = ImprintAttributor(task_of(model, decay=False), plan)
    found = ImprintAttributor(task_of(model, decay=False, target_func=target), plan)
    expected = -2 * plain.attribute(loader(TRAIN), loader(TEST))
    torch.testing.assert_close(found.attribute(loader(TRAIN), loader(TEST)), expected, rtol=1e-4, atol=1e-4)


def test_how_loaders_cut_batches_does_not_matter(model: nn.Module, scores: Tensor) -> None:
    attributor = ImprintAttributor(task_of(model), LONG)
    attributor.cache(DataLoader(TensorDataset(*TRAIN), batch_size=7))
    found = attributor.attribute(loader(TRAIN), DataLoader(TensorDataset(*TEST), batch_size=5))
    torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)


def test_batches_may_be_lists_or_tuples(model: nn.Module) -> None:
    def given(kind: type) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*TRAIN), batch_size=7, collate_fn=lambda rows: kind(default_collate(rows)))

    assert [type(next(iter(given(kind)))) for kind in (list, tuple)] == [list, tuple]
    attributors = [ImprintAttributor(task_of(model), Plan(steps=5, lr=0.5)) for _ in range(2)]
    found = [a.attribute(given(kind), loader(TEST)) for a, kind in zip(attributors, (list, tuple), strict=True)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (
            [{"x": row, "y": label} for row, label in zip(*TEST, strict=True)],
            r"got \{'x': float32 \(5, 4\), 'y': int64",
        ),
        (TEST[0], r"got float32 \(5, 4\)\. Give it a collate_fn"),
        ([(row, "a text") for row in TEST[0]], r"got \(float32 \(5, 4\), "),
        ([], "the loader yields no batch"),
    ],
    ids=["mappings", "bare tensors", "texts", "nothing"],
)
def test_loaders_of_other_batches_are_refused(model: nn.Module, samples: Any, says: str) -> None:
    attributor = ImprintAttributor(task_of(model), Plan(steps=2, lr=0.5))
    given = DataLoader(samples, batch_size=5)
    with pytest.raises(DataError, match=says):
        attributor.cache(given)
    with pytest.raises(DataError, match=says):
        attributor.attribute(loader(TRAIN), given)


def test_another_loader_can_be_cached_instead(model: nn.Module) -> None:
    attributor, fresh = (ImprintAttributor(task_of(model), Plan(steps=20, lr=0.5)) for _ in range(2))
    other = blobs(40, 5)
    attributor.cache(loader(TRAIN))
    attributor.cache(loader(other))
    found = attributor.attribute(loader(other), loader(TEST))
    assert found.shape == (40, QUERIES)
    torch.testing.assert_close(found, fresh.attribute(loader(other), loader(TEST)))


def test_a_loader_of_other_examples_than_were_cached_is_refused(model: nn.Module) -> None:
    attributor = ImprintAttributor(task_of(model), Plan(steps=2, lr=0.5))
    attributor.cache(loader(TRAIN))
    with pytest.raises(DataError, match="60 training examples were cached, this loader has 50"):
        attributor.attribute(loader(blobs(50, 0)), loader(TEST))
    for wrong in (loader(blobs(N, 7)), loader(TRAIN, shuffle=True)):
        with pytest.raises(
            DataError, match="other training examples than the cached ones, or the same in another order"
        ):
            attributor.attribute(wrong, loader(TEST))
    assert attributor.attribute(loader(TRAIN), loader(TEST)).shape == (N, QUERIES)


def test_without_dattri_the_extra_that_has_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dattri.algorithm.base", None)
    monkeypatch.delitem(sys.modules, "imprint.benchmarking.dattri")
    with pytest.raises(MissingExtra, match=r"imprint-attribution\[bench\]"):
        importlib.import_module("imprint.benchmarking.dattri")
