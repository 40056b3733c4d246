"""Milliseconds per query by readout and number of sources, beside a plain forward and merely reading the imprints.

    python benchmarks/query_cost.py
    python benchmarks/query_cost.py --device cuda    # also of a captured forward and a captured jvp

A 9-layer 512-wide perceptron, one query batch; imprints are random, since cost does not depend on their values. All
times are medians of repeated calls in one process, so their ratios can be compared; the machine matters for the rest.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from imprint import Plan, Reader, Sources, simulate
from imprint.batches import leaves, map_tensors
from imprint.readout.kernels import difference_scores, forward_only, gradient_scores, jvp_scores, query_gradients
from imprint.runtime.cuda_graphs import Recorder
from imprint.runtime.memory import tensor_bytes
from imprint.task import Batch, Parameters, Task
from imprint.tensors.vectors import norm, row_norms

WIDTH, LAYERS, CLASSES = 512, 9, 10
COUNTS = {"cpu": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000], "cuda": [1, 8, 32, 128, 512, 1000]}
SECONDS = {"cpu": 0.6, "cuda": 0.15}


@dataclass(frozen=True)
class Case:
    """A number of sources and a choice of layers."""

    layers: str
    globs: str | list[str]


CASES = (Case("all layers", "*"), Case("last two layers", [f"{2 * (LAYERS - 2)}.*", f"{2 * (LAYERS - 1)}.*"]))


def perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH if index < LAYERS - 1 else CLASSES), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def median_ms(function: Callable[[], object], device: torch.device) -> float:
    """The median of at least five calls, after one to warm up."""

    def once() -> float:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    once()
    times = [once()]
    while len(times) < 5 or (sum(times) < 1000 * SECONDS[device.type] and len(times) < 200):
        times.append(once())
    return statistics.median(times)


def captured(recorder: Recorder, compute: Callable[[Batch], Tensor], batch: Batch) -> Callable[[], object]:
    """A query by a CUDA graph: the batch copied in, and the graph repeated."""
    static = map_tensors(torch.clone, batch)
    recorder.rehearse(lambda: compute(static))
    repeat = recorder.record(lambda: compute(static))

    def ask() -> None:
        for mine, given in zip(leaves(static), leaves(batch), strict=True):
            mine.copy_(given)
        repeat()

    return ask


def read(imprints: Parameters) -> Tensor:
    """Every value once, and nothing else."""
    return torch.stack([tensor.sum() for tensor in imprints.values()])


def costs(case: Case, sources: int, queries: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    model = perceptron().to(device)
    task = Task.classifier(model, parameters=case.globs)
    functional, theta = task.at(task.state())
    batch = (torch.randn(queries, WIDTH, device=device), torch.randint(0, CLASSES, (queries,), device=device))
    imprints = {name: torch.randn(sources, *p.shape, device=device) for name, p in theta.items()}

    def measure(theta: Parameters) -> Tensor:
        return functional.measures(theta, batch, queries)

    def forward(some: Batch) -> Tensor:
        return functional.measures(theta, some, queries)

    def jvp(some: Batch) -> Tensor:
        return jvp_scores(lambda theta: functional.measures(theta, some, queries), theta, imprints, vectorise=True)

    step = (1e-3 * norm(theta) / row_norms(imprints)).to(next(iter(theta.values())).dtype)
    with forward_only(task):
        times = {
            "forward": median_ms(lambda: forward(batch), device),
            "reading": median_ms(lambda: read(imprints), device),
            "jvp": median_ms(lambda: jvp(batch), device),
            "central": median_ms(
                lambda: difference_scores(measure, theta, imprints, step, step, vectorise=True), device
            ),
            "gradient": median_ms(
                lambda: gradient_scores(imprints, query_gradients(functional, theta, batch, queries, vectorise=True)),
                device,
            ),
        }
        if device.type == "cuda":
            recorder = Recorder(device)
            times["captured forward"] = median_ms(captured(recorder, forward, batch), device)
            times["captured jvp"] = median_ms(captured(recorder, jvp, batch), device)
    found = {name: value / queries for name, value in times.items()}
    if "captured jvp" in times:
        found["TB/s"] = tensor_bytes(imprints) / times["captured jvp"] / 1e9  # that it reads imprints at
    return found


def ask_reader(device: torch.device, sources: int = 8) -> list[float]:
    """Milliseconds that a query takes through a `Reader`, which also looks for changes: plain, and captured."""
    torch.manual_seed(0)
    task = Task.classifier(perceptron().to(device))
    data = (torch.randn(2 * sources, WIDTH), torch.arange(2 * sources) % CLASSES)
    plan = Plan(engine="trajectories", steps=1, lr=1e-3)
    store = simulate(task, data, Sources.by_label([row % sources for row in range(2 * sources)]), plan, progress=False)
    query = tuple(column[:1].to(device) for column in data)
    readers = [Reader(task, store, capture=capture) for capture in (False, True)]
    return [median_ms(lambda reader=reader: reader.scores(query), device) for reader in readers]  # type: ignore[misc]


def crossover(rows: list[tuple[int, dict[str, float]]]) -> str:
    """From how many sources on a backward pass per query stays cheaper than jvp."""
    cheaper = [times["gradient"] < times["jvp"] for _, times in rows]
    if not cheaper[-1]:
        return f"jvp is cheaper than gradient at {rows[-1][0]} sources"
    first = len(cheaper) - next((i for i, yes in enumerate(reversed(cheaper)) if not yes), len(cheaper))
    return f"gradient is cheaper than jvp from {rows[first][0]} sources on"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", help="by default 1 to 1,000")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device  # with its number
    names = ["forward", "reading", "jvp", "central", "gradient"]
    names += ["captured forward", "captured jvp", "TB/s"] if device.type == "cuda" else []
    digits = 3 if device.type == "cuda" else 2
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}, float32")
    at_32: dict[tuple[str, int], dict[str, float]] = {}
    for queries in arguments.queries:
        for case in CASES:
            print(f"\n{case.layers}, {queries} queries at once: milliseconds per query")
            print(f"| sources | {' | '.join(names)} | jvp / reading |")
            print("|---:" * (len(names) + 2) + "|")
            rows = []
            for sources in arguments.sources or COUNTS[device.type]:
                times = costs(case, sources, queries, device)
                rows.append((sources, times))
                cells = " | ".join(f"{times[name]:.{digits}f}" for name in names)
                print(f"| {sources} | {cells} | {times['jvp'] / times['reading']:.2f} |", flush=True)
                if sources == 32:
                    at_32[case.layers, queries] = times
            print(crossover(rows))
    for queries in arguments.queries:
        if ("all layers", queries) in at_32:
            share = at_32["last two layers", queries]["jvp"] / at_32["all layers", queries]["jvp"]
            print(f"\n32 sources, {queries} queries: jvp on the last two layers takes {share:.2f} of the time for all.")
    if device.type == "cuda":
        plain, by_graph = ask_reader(device)
        print(f"\nThrough a Reader, 8 sources, all layers: {plain:.3f} ms plain, {by_graph:.3f} ms captured.")


if __name__ == "__main__":
    main()
