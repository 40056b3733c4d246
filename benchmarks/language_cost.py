"""What attributing a completion costs, in plain forward passes of the same model: readouts, blocks and adapters.

    python benchmarks/language_cost.py --device cuda    # also of a captured forward and a captured jvp
    python benchmarks/language_cost.py --device cuda --selections last:2 lora:16 --tokens 64 256 --queries 1
    python benchmarks/language_cost.py --small

GPT-2 of 124 million parameters as its configuration makes it, 256 tokens, 16 sources; imprints are random, since cost
does not depend on their values. Medians of repeated calls in one process; memory is the peak of a call beside that of
the plain forward pass.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from query_cost import captured
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import imprint
from imprint import language
from imprint.readout.kernels import forward_only, gradient_scores, jvp_scores, query_gradients
from imprint.runtime.cuda_graphs import Recorder
from imprint.task import Parameters

SELECTIONS = {
    "all blocks": "last:12",
    "last:2": "last:2",
    "last:1": "last:1",
    "lora:16": "lora:16",
    "lora:16:last:2": "lora:16:last:2",
}


def measured(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[tuple[float, float]]:
    """The median seconds of each call after one to warm up, and the most memory that it adds, in bytes.

    The calls take turns, so that a machine that is slow for a while is slow for all of them.
    """
    times: list[list[float]] = [[] for _ in calls]
    most = [0.0] * len(calls)
    for _ in range(repeats + 1):
        for which, call in enumerate(calls):
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
                most[which] = max(most[which], torch.cuda.max_memory_allocated() - held)
            times[which].append(time.perf_counter() - begin)
    return [(statistics.median(taken[1:]), added) for taken, added in zip(times, most, strict=True)]


@dataclass(frozen=True)
class Costs:
    """Of attributing some queries: seconds of a plain forward pass and of each readout, and bytes that they add.

    captured: seconds of the forward pass and of the jvp by CUDA graphs, on a GPU.
    """

    plain: float
    jvp: float
    gradient: float
    plain_bytes: float
    jvp_bytes: float
    captured: tuple[float, ...]

    def __str__(self) -> str:
        captured = "".join(f"| {1e3 * seconds:.1f} ms " for seconds in self.captured)
        return (
            f"{1e3 * self.plain:.1f} ms | {self.jvp / self.plain:.1f} | {self.gradient / self.plain:.1f} "
            f"| {self.jvp_bytes / 1e6:,.0f} MB | {self.plain_bytes / 1e6:,.0f} MB {captured}|"
        )


def costs(task: imprint.Task, imprints: Parameters, batch: dict[str, Tensor], repeats: int) -> Costs:
    count, device = len(batch["input_ids"]), task.device
    functional, theta = task.at(task.state())

    def plainly(some: dict[str, Tensor] = batch) -> Tensor:
        return functional.measures(theta, some, count)

    def forward(some: dict[str, Tensor] = batch) -> Tensor:
        return jvp_scores(lambda theta: functional.measures(theta, some, count), theta, imprints, vectorise=True)

    def backward() -> Tensor:
        return gradient_scores(imprints, query_gradients(functional, theta, batch, count, vectorise=True))

    with forward_only(task):
        (plain, plain_bytes), (jvp, jvp_bytes), (gradient, _) = measured((plainly, forward, backward), device, repeats)
        if device.type == "cuda":
            recorder = Recorder(device)
            graphs = [captured(recorder, compute, batch) for compute in (plainly, forward)]
            repeated = tuple(seconds for seconds, _ in measured(graphs, device, repeats))
        else:
            repeated = ()
    return Costs(plain, jvp, gradient, plain_bytes, jvp_bytes, repeated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sources", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--selections", nargs="+", choices=SELECTIONS, default=list(SELECTIONS))
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--precision", default="highest", choices=("highest", "high", "medium"), help="of products")
    parser.add_argument("--small", action="store_true", help="a model of seconds, to see that it runs")
    options = parser.parse_args()
    device = torch.empty(0, device=options.device).device  # with its number
    torch.set_float32_matmul_precision(options.precision)
    torch.manual_seed(0)
    small: dict[str, Any] = {"n_embd": 64, "n_head": 4, "vocab_size": 500} if options.small else {}
    config = GPT2Config(**small, bos_token_id=None, eos_token_id=None)
    model: Any = GPT2LMHeadModel(config).to(device).eval()
    size = sum(p.numel() for p in model.parameters())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{where}, torch {torch.__version__}, {size / 1e6:.0f} M parameters, float32, "
        f"matrix products in {options.precision!r} precision"
    )
    print(f"\n{options.sources} sources, in plain forward passes of the same queries:\n")
    columns = ["imprints in", "values per source", "tokens", "queries", "plain", "jvp", "gradient"]
    columns += ["memory of jvp", "of a forward"]
    columns += ["captured plain", "captured jvp"] if device.type == "cuda" else []
    print(f"| {' | '.join(columns)} |")
    print("|---" + "|---:" * (len(columns) - 1) + "|")
    for name in options.selections:
        task = language.task(model, parameters=SELECTIONS[name])
        theta = task.at(task.state())[1]
        imprints = {key: torch.randn(options.sources, *p.shape, device=device) for key, p in theta.items()}
        values = sum(p.numel() for p in theta.values())
        for tokens, queries in product(options.tokens, options.queries):
            ids = torch.randint(0, config.vocab_size, (queries, tokens), device=device)
            weights = torch.ones(ids.shape, device=device).index_fill(1, torch.tensor([0], device=device), 0.0)
            found = costs(task, imprints, {"input_ids": ids, "weights": weights}, options.repeats)
            print(f"| {name} | {values:,} | {tokens} | {queries} | {found}", flush=True)
        del imprints


if __name__ == "__main__":
    main()
