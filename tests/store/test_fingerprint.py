"""Fingerprints tell what differs, and do not tell what is only cut or placed otherwise."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate

from imprint import Plan, Sources, Store, StoreError, Task, attribute, self_influence, simulate
from imprint.data import Data
from imprint.errors import DataError, ReadoutError, ReliabilityWarning
from imprint.evaluation import Subsets, retrain
from imprint.evaluation.matching import check_origin
from imprint.store.fingerprint import SAMPLED, compare_data, of_batches, of_data, of_each, of_tensors, recognise_data

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CPU, N = torch.device("cpu"), 1400
DRAWN = {*np.random.default_rng(0).choice(N, SAMPLED, replace=False).tolist()}  # the examples of a sample
UNSEEN = next(i for i in range(N) if i not in DRAWN)


def of(*columns: torch.Tensor) -> str:
    return of_batches([(len(columns[0]), columns)])


def test_queries_of_the_same_bytes_and_another_kind_are_others() -> None:
    numbers = torch.arange(8, dtype=torch.int32)
    assert of(numbers) != of(numbers.view(torch.float32))
    rows = numbers.reshape(2, 4)
    assert of(rows) != of(rows.reshape(2, 2, 2))
    assert of(rows) != of(rows[:, :2], rows[:, 2:])


def test_tensors_that_are_hashed_at_once_have_the_hashes_they_have_alone() -> None:
    tensors = {
        **{f"{index}": torch.randn(50 + index, 3) for index in range(20)},
        "half": torch.randn(4, 4).bfloat16().T,
        "parameter": nn.Parameter(torch.zeros(())),
        "none": torch.empty(0, 2),
    }
    assert of_each(tensors) == {name: of_tensors({name: tensor}) for name, tensor in tensors.items()}
    assert len(set(of_each(tensors).values())) == len(tensors)
    assert of_each({}) == {}


@on_a_gpu
@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_tensors_on_a_gpu_have_the_hash_they_have_on_the_cpu(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imprint.store.fingerprint._PIECE", piece)
    tensors = {
        **{f"{index}": torch.randn(50 + index, 3) for index in range(20)},
        "half": torch.randn(4, 4).bfloat16().T,
        "parameter": nn.Parameter(torch.zeros(())),
        "none": torch.empty(0, 2),
        "mask": torch.rand(9) < 0.5,
    }
    there = {name: tensor.detach().cuda() for name, tensor in tensors.items()}
    assert of_tensors(there) == of_tensors(tensors)
    assert of_each(there) == of_each(tensors)


def test_queries_may_be_cut_into_any_batches() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    parts = [(2, (x[:2], y[:2])), (4, (x[2:], y[2:]))]
    assert of_batches(parts) == of(x, y)
    assert of_batches(reversed(parts)) != of(x, y)


# --- training data


def columns() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, generator=generator), torch.randint(0, 2, (N,), generator=generator)


def one_label_changed(example: int = UNSEEN) -> tuple[Tensor, Tensor]:
    """Data of which a sample looks as before."""
    x, y = columns()
    y[example] = 1 - y[example]
    return x, y


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Linear(3, 2))


def run(out: Path | None, data: Any = None, **options: Any) -> Store:
    sources = options.pop("sources", Sources.by_label([i % 3 for i in range(N)]))
    given = columns() if data is None else data
    return simulate(task(), given, sources, Plan(steps=2, lr=0.1), out=out, **{"progress": False, **options})


class Killed(BaseException):
    pass


def die(done: int, total: int, /) -> None:
    if done > 0.6 * total:  # with a shard or two on disk
        raise Killed


def test_one_changed_label_among_thousands_is_other_data(tmp_path: Path) -> None:
    run(tmp_path / "store")
    with pytest.raises(StoreError, match="the training data changed"):
        run(tmp_path / "store", one_label_changed())


def test_a_run_is_not_resumed_with_one_label_changed(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "store", memory="200B", progress=die)
    with pytest.raises(StoreError, match="the training data changed"):
        run(tmp_path / "store", one_label_changed(), memory="200B")


def test_a_store_is_not_repeated_with_one_label_changed(tmp_path: Path) -> None:
    store = run(tmp_path / "store")
    with pytest.raises(StoreError, match=r"cannot be repeated: the training data changed\.$"):
        run(tmp_path / "again", one_label_changed(), repeat=store)


def test_self_influence_is_not_read_with_one_label_changed() -> None:
    store = run(None, sources=Sources.per_example(N))
    self_influence(task(), store, columns(), progress=False)
    with pytest.raises(ReadoutError, match="not the training examples"):
        self_influence(task(), store, one_label_changed(), progress=False)


def test_scores_are_not_compared_with_the_truth_of_one_label_changed() -> None:
    def train(subset: Tensor, seed: int) -> nn.Module:
        linear = nn.Linear(3, 2)
        nn.init.constant_(linear.weight, float(subset.sum() % 97))
        return linear

    queries = tuple(column[:2] for column in columns())
    result = attribute(task(), run(None), queries, progress=False)
    halves = Subsets.without_each(Sources.by_label([i % 3 for i in range(N)]))
    for data, same in ((columns(), True), (one_label_changed(), False)):
        truth = retrain(train, task(), queries, halves, data=data, progress=False)
        if same:
            check_origin(result.labels, truth.about["fingerprints"])
            continue
        with pytest.raises(DataError, match="other training data"):
            check_origin(result.labels, truth.about["fingerprints"])


def test_a_sampled_hash_is_an_option_that_every_comparison_names(tmp_path: Path) -> None:
    """With it changes in other examples go unseen, and the store, a reuse, a resume and self-influence say so."""
    with pytest.warns(ReliabilityWarning, match="hashed by a sample of 1,024 of its 1,400 examples"):
        store = run(tmp_path / "store", hash_data="sampled")
    assert any("by a sample" in warning for warning in store.warnings)
    assert store.manifest.request.data.all is None
    sampled = r"sampled: 1,024 of its 1,400 examples were compared"
    with pytest.warns(ReliabilityWarning, match=sampled):
        run(tmp_path / "store")
    with pytest.warns(ReliabilityWarning, match=sampled):
        run(tmp_path / "again", repeat=store)
    with pytest.raises(StoreError, match=rf"the training data changed \({sampled}\)"):
        run(tmp_path / "store", one_label_changed(min(DRAWN)))
    each = run(None, sources=Sources.per_example(N), hash_data="sampled")
    with pytest.warns(ReliabilityWarning, match=sampled):
        self_influence(task(), each, columns(), progress=False)
    labels = attribute(task(), store, tuple(column[:1] for column in columns()), progress=False).labels
    with pytest.warns(ReliabilityWarning, match=f"scores and ground truth is taken to be the same .{sampled}"):
        check_origin(labels, {"data": of_data(Data(columns(), device=CPU))})


def test_what_was_begun_with_a_sample_does_not_end_as_hashed_in_full(tmp_path: Path) -> None:
    with pytest.raises(Killed), pytest.warns(ReliabilityWarning):
        run(tmp_path / "store", memory="200B", progress=die, hash_data="sampled")
    with pytest.warns(ReliabilityWarning, match="sampled"):
        store = run(tmp_path / "store", memory="200B")
    assert store.manifest.request.data.all is None
    assert any("by a sample" in warning for warning in store.warnings)


def test_small_data_is_always_compared_in_full() -> None:
    x, y = (column[:SAMPLED] for column in columns())
    few = Data((x, y), device=CPU)
    sampled = of_data(few, "sampled")["sampled"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        likeness = recognise_data(sampled, few)
        likeness.warn()
    assert likeness.same and likeness.by == "all"
    assert compare_data(sampled, of_data(Data((x, 1 - y), device=CPU)), SAMPLED).same is False
    assert compare_data(None, sampled, SAMPLED).by == "none"


@settings(max_examples=25, deadline=None)
@given(batch_size=st.integers(1, 300), n=st.integers(1, 200))
def test_a_hash_is_the_same_for_columns_samples_and_batches(batch_size: int, n: int) -> None:
    x, y = (column[:n] for column in columns())
    expected = of_data(Data((x, y), device=CPU))
    rows = list(zip(x, y, strict=True))
    assert of_data(Data(rows, device=CPU, batch_size=batch_size)) == expected
    assert of_data(Data(rows, device=CPU, batch_size=batch_size, collate_fn=default_collate)) == expected
    wide = x.repeat(1, 2)[:, :3]  # not contiguous
    assert of_data(Data((wide, y), device=CPU, batch_size=batch_size)) == expected


def padded(samples: list[Tensor]) -> dict[str, Any]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"ids": ids, "words": [f"{len(sample)} words" for sample in samples], "kind": "text"}


def test_a_hash_sees_every_part_of_batches_that_are_no_columns() -> None:
    texts = [torch.arange(1 + i % 7) for i in range(200)]

    def of_texts(texts: list[Tensor], collate: Any = padded, batch_size: int = 10) -> str | None:
        return of_data(Data(texts, device=CPU, batch_size=batch_size, collate_fn=collate))["all"]

    first = of_texts(texts)
    assert of_texts(texts, batch_size=64) == first
    for example in (0, 70, 199):
        other = [*texts]
        other[example] = texts[example] + 1
        assert of_texts(other) != first
    assert of_texts(texts, lambda samples: {**padded(samples), "kind": "poem"}) != first
    assert of_texts(texts, lambda samples: {**padded(samples), "words": ["?"] * len(samples)}) != first
    assert of_texts(texts[::-1]) != first


def test_a_hash_tells_kinds_and_shapes_of_the_same_bytes() -> None:
    numbers = torch.arange(8, dtype=torch.int32)
    forms = [(numbers,), (numbers.view(torch.float32),), (numbers.reshape(8, 1),), (numbers[:4], numbers[4:])]
    assert len({of_data(Data(form, device=CPU))["all"] for form in forms}) == 4


def test_large_columns_are_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = of_data(Data(columns(), device=CPU))
    monkeypatch.setattr("imprint.store.fingerprint._PIECE", 100)
    assert of_data(Data(columns(), device=CPU)) == expected
