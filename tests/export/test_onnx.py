"""One run of an ONNX graph scores all sources as `central` does at the same gains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from imprint import Store, StoreError, Task, export, simulate
from imprint.export import Export, OnnxReader
from imprint.export.gains import choose_gains
from imprint.export.graph import Graph
from imprint.export.likelihood import as_batches
from imprint.export.lora import plain_model
from imprint.export.onnx import DISPLACEMENTS, _displacements
from imprint.export.point import Point
from imprint.export.writing import _hash_files
from tests.export import models

CASES = [("gpt2", "*lora_B*", 4, False), ("llama", "*lora_*", 8, True)]


@pytest.fixture(scope="module", params=CASES, ids=["gpt2", "llama A and B, scale 2"])
def exported(request: Any) -> tuple[Task, Store, Export]:
    return models.graph(*request.param)


def test_the_graph_scores_as_central_does(exported: Any) -> None:
    task, store, found = exported
    read = export.read_onnx(found.folder, models.queries())
    assert models.deviation(read.measured, models.central(task, store, found)) < 1e-4
    assert found.self_test.central < 1e-4
    assert read.source_ids == list(store.source_ids)
    assert not bool(read.refused.all())


@pytest.mark.parametrize(("queries", "tokens"), [(1, 2), (1, 12), (5, 7)])
def test_it_takes_any_number_of_queries_and_tokens(exported: Any, queries: int, tokens: int) -> None:
    task, store, found = exported
    asked = {name: column[:, -tokens:].contiguous() for name, column in models.columns(queries, seed=5).items()}
    expected = models.central(task, store, found, asked)
    assert models.deviation(OnnxReader(found).measured(asked), expected) < 1e-4 + found.rounding / float(
        (expected * found.gains).abs().mean()
    )


@pytest.mark.parametrize("chosen", [[1], [2, 0, 1, 0, 2]])
def test_it_takes_any_number_of_sources(exported: Any, chosen: list[int]) -> None:
    _, _, found = exported
    reader = OnnxReader(found)
    whole = reader.measured(models.queries())
    reader._fixed = {name: values[chosen] for name, values in reader._fixed.items()}
    assert models.deviation(reader.measured(models.queries()), whole[:, chosen]) < 1e-4


def test_padding_does_not_change_scores(exported: Any) -> None:
    _, _, found = exported
    asked = models.queries()
    padded = {name: torch.cat([column, torch.zeros_like(column[:, :3])], 1) for name, column in asked.items()}
    reader = OnnxReader(found)
    assert models.deviation(reader.measured(padded), reader.measured(asked)) < 1e-4


def _graph(task: Task, store: Store) -> tuple[Graph, list[Tensor], Tensor, Tensor]:
    """The computation before it is exported, its displacements and gains, and what `central` says."""
    point, queries = Point.of(task, store, None, None), as_batches(models.queries(), torch.device("cpu"))
    gains = choose_gains(point, queries, "float32").values
    graph = Graph(plain_model(task, point.state), point.layers, point.state, task.names).eval()
    return graph, list(_displacements(point).values()), gains.float(), point.read(queries, gains)


@torch.no_grad()
def test_what_lies_before_the_first_adapted_block_is_computed_once_for_each_query() -> None:
    graph, displacements, gains, expected = _graph(*models.prepared("gpt2"))
    rows = []
    for block in graph.model.transformer.h:
        block.register_forward_hook(lambda *call: rows.append(len(call[-1])))
    asked = models.queries()
    scores = graph(asked["input_ids"], asked["weights"], gains, displacements)
    assert rows == [4, 4 * 2 * 3, 4 * 2 * 3]
    assert models.deviation(scores.double(), expected) < 1e-4


@torch.no_grad()
def test_adapters_outside_of_the_blocks_are_scored_too() -> None:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["lm_head", "q_proj"])
    task = models.task(peft.get_peft_model(models.llama(), config))
    store = simulate(task, models.data(), models.sources(), models.PLAN, progress=False)
    graph, displacements, gains, expected = _graph(task, store)
    asked = models.queries()
    scores = graph(asked["input_ids"], asked["weights"], gains, displacements)
    assert models.deviation(scores.double(), expected) < 1e-4


def test_displacements_of_another_shape_are_refused(exported: Any, tmp_path: Path) -> None:
    _, _, found = exported
    for name in found.files:
        (tmp_path / name).write_bytes((found.folder / name).read_bytes())
    tensors = load_file(tmp_path / DISPLACEMENTS)
    wrong = {name: tensor[..., :2].contiguous() for name, tensor in tensors.items()}
    for kept, message in ((wrong, "the graph takes"), (dict(list(tensors.items())[1:]), "files are of different")):
        save_file(kept, tmp_path / DISPLACEMENTS)
        moved = Export(**{**vars(found), "folder": tmp_path, "files": _hash_files(tmp_path)})
        with pytest.raises(StoreError, match=message):
            OnnxReader(moved)
    (tmp_path / "scores.onnx").write_bytes(b"no graph")
    with pytest.raises(StoreError, match="onnxruntime does not load"):
        OnnxReader(moved)
