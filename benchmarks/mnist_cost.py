"""What every example of MNIST-MLP costs: imprints at four checkpoints and 500 queries, beside caching for TRAK.

    IMPRINT_DATA=... python benchmarks/mnist_cost.py --device cpu

Each is measured in a process of its own, one after the other on the same machine; TRAK caches one model, and TRAK-50 is
taken to cost fifty times that. The trained model and its checkpoints are not counted for either; choosing a plan is.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

import imprint
from imprint.benchmarking.bench import Bench
from imprint.benchmarking.peers import peers
from imprint.benchmarking.settings.catalogue import load_protocol
from imprint.runtime.memory import Peak

EPOCHS = (2, 3, 5, 8)
PLANS: dict[str, tuple[imprint.Plan | None, torch.dtype | None]] = {
    "Imprint, Plan.auto": (None, None),
    "Imprint, 300 directions": (imprint.Plan(engine="spectral", steps="infinite", damping=0.02), None),
    "Imprint, 200 directions": (imprint.Plan(engine="spectral", steps="infinite", damping=0.02, directions=200), None),
    "Imprint, 300 directions, bfloat16": (
        imprint.Plan(engine="spectral", steps="infinite", damping=0.02),
        torch.bfloat16,
    ),
}


def bench(out: str, device: str) -> Bench:
    """A benchmark whose training ends with the last checkpoint that is wanted."""
    found = load_protocol("mnist-mlp", device)
    short = replace(found.train, training=replace(found.train.training, epochs=EPOCHS[-1]))
    return Bench(replace(found, train=short, checkpoints=EPOCHS), out, progress=False)


def ours(out: str, device: str, name: str) -> dict[str, Any]:
    """Simulate and attribute."""
    made = bench(out, device)
    plan, dtype = PLANS[name]
    task, data = made.protocol.build_task("margin"), made.protocol.train.examples
    states = made.states([0])[0]
    columns, sources = data.gather(torch.arange(len(data))), imprint.Sources.per_example(len(data))
    peak, begin = Peak(data.device), time.monotonic()
    plan = plan or imprint.Plan.auto(task, columns, sources, states, progress=False)
    store = imprint.simulate(task, columns, sources, plan, checkpoints=states, dtype=dtype, progress=False)
    ready = time.monotonic()
    imprint.attribute(task, store, made.protocol.queries, readout="gradient", batch_size=500, progress=False)
    took = time.monotonic()
    return {"prepare": ready - begin, "query": took - ready, "peak_bytes": peak.bytes, "bytes": store.bytes}


def trak(out: str, device: str, name: str) -> dict[str, Any]:
    """Cache one model for TRAK and attribute."""
    made = bench(out, device)
    found = made.score(peers(made)["TRAK-1"], 0)
    return {"prepare": found.prepare, "query": found.query, "peak_bytes": found.peak_bytes, "bytes": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    apart = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        bench(out, options.device).states([0])
        results = {}
        for name in (*PLANS, "TRAK-1"):
            with apart.Pool(1) as pool:
                results[name] = pool.apply(trak if name == "TRAK-1" else ours, (out, options.device, name))
            cost = results[name]
            print(
                f"{name:36s} {cost['prepare']:7.1f} s before, {cost['query']:6.2f} s for 500 queries, "
                f"peak {(cost['peak_bytes'] or 0) / 1e6:6,.0f} MB, kept {cost['bytes'] / 1e6:6,.0f} MB",
                flush=True,
            )
    fifty = 50 * results["TRAK-1"]["prepare"]
    for name in PLANS:
        whole = results[name]["prepare"] + results[name]["query"]
        print(f"{name}: {whole:.1f} s, {whole / fifty:.3f} of caching for TRAK-50 ({fifty:.0f} s)")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
