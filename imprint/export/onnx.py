"""Imprints beside one ONNX graph that scores all of them in a single run, on a CPU, without PyTorch.

export.json                sources, gains, noise floors, the outcome of the self-test
probes.safetensors         a few queries
scores.onnx                input_ids, weights, gains and the displacements -> scores (queries, sources)
displacements.safetensors  one stack per selected parameter, rows = sources, by the names of the graph's inputs
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from imprint.errors import MissingExtra, ReadoutError, StoreError, first_line
from imprint.export.gains import choose_gains
from imprint.export.graph import Graph
from imprint.export.lora import plain_model
from imprint.export.point import Point
from imprint.export.reading import Scores, scores
from imprint.export.record import Export
from imprint.export.writing import prepare_export, write_export
from imprint.store.files import write_tensors
from imprint.store.reading import Store
from imprint.task import Parameters, Task

GRAPH, DISPLACEMENTS = "scores.onnx", "displacements.safetensors"
_ONE_FILE = 1 << 30  # an ONNX file ends at 2 GiB; above this the weights are beside it


def to_onnx(
    task: Task,
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    queries: Any,
    *,
    sources: Sequence[str] | None = None,
    checkpoint: int | None = None,
) -> Export:
    """Write a graph that scores every source in one run, and test it on `queries` in onnxruntime.

    queries: completions like those to be asked: gains are chosen and noise is measured on them.
    sources: ids, by default all. checkpoint: by default the one with the most weight.
    """
    _runtime()
    store = Store.of(store)
    if store.removes:
        raise ReadoutError(
            "an ONNX graph moves both ways along imprints, and those of this store are removals that were really made: "
            "export the adapters without each source, to_peft (--format peft)."
        )
    point, batches = prepare_export(task, store, folder, queries, sources, checkpoint)
    gains = choose_gains(point, batches, "float32")

    def fill(where: Path, _: Path) -> tuple[None, dict[str, tuple[str, ...]]]:
        stacks = _displacements(point)
        model = plain_model(task, point.state).cpu().float()
        at = {name: tensor.cpu().float() for name, tensor in point.state.items()}
        graph = Graph(model, point.layers, at, task.names).eval()
        _export(graph, stacks, where / GRAPH)
        write_tensors(where / DISPLACEMENTS, stacks)
        return None, {}

    def tested(draft: Export) -> Tensor:
        return OnnxReader(draft).measured(queries)

    return write_export("onnx", folder, point, batches, gains, "float32", fill, tested)


class OnnxReader:
    """The graph of an export, loaded to score completions in onnxruntime on the CPU."""

    def __init__(self, export: Export | str | os.PathLike[str]) -> None:
        self.export = Export.open(export, "onnx")
        self._session = _session(self.export.folder / GRAPH)
        self._fixed = {"gains": self.export.gains.float().numpy()}
        self._fixed |= {name: u.numpy() for name, u in load_file(self.export.folder / DISPLACEMENTS).items()}
        _refuse_inputs(self.export, self._session, self._fixed)

    def scores(self, queries: Any) -> Scores:
        """Score completions for every source."""
        return scores(self.export, self.measured(queries))

    def measured(self, queries: Any) -> Tensor:
        """Return what the graph returns, (queries, sources), without noise floors."""
        rows = []
        for _, batch in self.export.batches(queries, torch.device("cpu")):
            asked = {"input_ids": batch["input_ids"].numpy(), "weights": batch["weights"].float().numpy()}
            rows.append(torch.from_numpy(self._session.run(["scores"], {**asked, **self._fixed})[0]).double())
        return torch.cat(rows)


def read_onnx(export: Export | str | os.PathLike[str], queries: Any) -> Scores:
    """Score completions by the graph of an export; `OnnxReader` keeps it loaded."""
    return OnnxReader(export).scores(queries)


def _displacements(point: Point) -> Parameters:
    """Return u_b of all chosen sources by parameter, in float32; those of B carry the adapter's scale."""
    scales = {layer.up: layer.scale for layer in point.layers}
    imprints = point.imprints(range(len(point.rows)))
    return {name: (scales.get(name, 1.0) * u).float().cpu().contiguous() for name, u in imprints.items()}


def _export(graph: Graph, stacks: Parameters, place: Path) -> None:
    """Trace the graph with free numbers of queries, tokens and sources, and write it."""
    free = torch.export.Dim.DYNAMIC
    # examples of sizes that differ from each other and from 1, which the exporter would take for fixed or equal
    ids = torch.zeros(2, 5, dtype=torch.int64)
    some = [torch.zeros(3, *stack.shape[1:]) for stack in stacks.values()]
    arguments = (ids, torch.ones(2, 5), torch.ones(3), some)
    shapes = ({0: free, 1: free}, {0: free, 1: free}, {0: free}, [{0: free} for _ in some])
    with _quietly():
        try:
            program = torch.onnx.export(
                graph,
                arguments,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=["input_ids", "weights", "gains", *stacks],
                output_names=["scores"],
                verbose=False,
            )
        except Exception as error:
            raise ReadoutError(f"the model cannot be exported to ONNX: {first_line(error)}.") from error
        assert program is not None
        program.save(place, external_data=sum(p.nbytes for p in graph.state_dict().values()) > _ONE_FILE)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter, which logs missing packages and failed attempts."""
    loud = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "onnxscript")]
    before = [logger.level for logger in loud]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            for logger in loud:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loud, before, strict=True):
                logger.setLevel(level)


def _runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra("an ONNX export", "language") from error
    return onnxruntime


def _session(path: Path) -> Any:
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # one setting for both
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise StoreError(f"onnxruntime does not load {path}: {first_line(error)}.") from error


def _refuse_inputs(export: Export, session: Any, given: dict[str, Any]) -> None:
    """Refuse displacements that are not those of the graph's parameters and of the export's sources."""
    expected = {i.name: i.shape[1:] for i in session.get_inputs() if i.name not in ("input_ids", "weights")}
    for name in {**expected, **given}:
        if name not in given or name not in expected:
            lacks = DISPLACEMENTS if name not in given else GRAPH
            raise StoreError(f"{export.folder / lacks} has no {name!r}: its files are of different exports.")
        shape = [len(export.sources), *expected[name]]
        if list(given[name].shape) != shape:
            raise StoreError(f"{name!r} in {export.folder} has shape {given[name].shape}, the graph takes {shape}.")
