"""The time of scoring all sources by an exported ONNX graph, as a ratio to the library's own readouts on the same CPU.

    python benchmarks/export_cost.py

A small GPT-2 with an adapter on all or on its last blocks; imprints are those of one step, since cost does not depend
on their values. PyTorch and onnxruntime have the same number of threads. All times are medians in one process.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers

import imprint
from imprint import export, language
from imprint.readout.kernels import forward_only


def model(given: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": given.width, "n_layer": given.layers, "n_head": 4}
    sizes |= {"vocab_size": given.vocabulary, "n_positions": given.tokens, "bos_token_id": 0, "eos_token_id": 0}
    kind: Any = transformers.GPT2LMHeadModel
    return kind(transformers.GPT2Config(**sizes, initializer_range=0.1))


def columns(rows: int, given: argparse.Namespace) -> dict[str, torch.Tensor]:
    weights = torch.ones(rows, given.tokens)
    weights[:, : given.tokens // 2] = 0
    return {"input_ids": torch.randint(0, given.vocabulary, (rows, given.tokens)), "weights": weights}


def medians(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each, medians of nine rounds in which they take turns, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(10):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def prepared(parameters: str, sources: int, given: argparse.Namespace, folder: Path) -> tuple[Any, Any, Any]:
    """A task, its store, and its exported graph."""
    task = language.task(model(given), parameters=parameters)
    plan = imprint.Plan(engine="tangent", steps=1, lr=0.01)
    each = imprint.Sources.per_example(sources)
    store = imprint.simulate(task, columns(sources, given), each, plan, out=folder / "store", progress=False)
    return task, store, export.OnnxReader(export.to_onnx(task, store, folder / "onnx", columns(2, given)))


def costs(task: Any, store: Any, reader: Any, batch: dict[str, torch.Tensor], queries: int) -> dict[str, float]:
    """Milliseconds by what is timed."""
    central, jvp = (imprint.Reader(task, store, readout=kind) for kind in ("central", "jvp"))
    functional, theta = task.at(task.state())
    with forward_only(task):
        return medians(
            {
                "ONNX": lambda: reader.measured(batch),
                "central": lambda: central.scores(batch),
                "jvp": lambda: jvp.scores(batch),
                "forward": lambda: functional.measures(theta, batch, queries),
            }
        )


def rows(given: argparse.Namespace) -> Iterator[str]:
    for parameters in given.parameters:
        for sources in given.sources:
            with tempfile.TemporaryDirectory() as folder:
                task, store, reader = prepared(parameters, sources, given, Path(folder))
                for queries in given.queries:
                    times = costs(task, store, reader, columns(queries, given), queries)
                    ratios = [times["ONNX"] / times[other] for other in ("forward", "central", "jvp")]
                    cells = f"{ratios[0]:.1f} | {ratios[1]:.2f} | {ratios[2]:.2f}"
                    yield f"| {parameters} | {queries} | {sources} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--parameters", nargs="+", default=["lora:8", "lora:8:last:2"])
    for name, default in (("width", 128), ("layers", 6), ("vocabulary", 2000), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(
        f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
        f"Python {platform.python_version()}, float32; GPT-2 of {given.layers} blocks, width {given.width}, "
        f"{given.vocabulary} tokens in the vocabulary, {given.tokens} in a query"
    )
    print("| imprints | queries | sources | ONNX / one forward | ONNX / central | ONNX / jvp |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows(given):
        print(row, flush=True)


if __name__ == "__main__":
    main()
