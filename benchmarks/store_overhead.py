"""What keeping imprints in a store costs: beside keeping them in memory, and beside plain writing.

    python benchmarks/store_overhead.py            # the demo's setting, and shards of 64 to 512 MB

Ratios of one run, medians of several repetitions in turn; the machine's own speed cancels.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from imprint.benchmarking.settings import digits
from imprint.data import Data
from imprint.evaluation.training import train_together
from imprint.simulation import engines
from imprint.simulation.inputs import Inputs
from imprint.simulation.path import Hooks
from imprint.simulation.runner import simulate
from imprint.store.files import sha256, write_tensors
from imprint.task import Parameters


def in_memory(inputs: Inputs) -> list[Parameters]:
    """The simulation without a store: every checkpoint settled and simulated, the imprints kept."""
    kept = []
    with inputs.task.evaluating():
        for index in range(len(inputs.settings)):
            engine = engines.at_checkpoint(inputs, index, inputs.state(index))
            engine.settle()
            kept.append(engine.simulate(engine.descent, Hooks()).imprints)
    return kept


def demo(repetitions: int) -> float:
    """Seconds with a store over seconds in memory, on the demo."""
    setting = digits.load(0)
    data = Data(setting.train, device=torch.device("cpu"))
    everyone = torch.arange(len(data))
    kept = train_together(digits.model, digits.task, data, [everyone], [0], digits.TRAINING, record=digits.CHECKPOINTS)
    states = [{name: t[0] for name, t in kept[epoch].items()} for epoch in digits.CHECKPOINTS]
    task = digits.task(digits.model())
    torch.set_num_threads(1)
    ratios = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        in_memory(
            Inputs.checked(
                task,
                setting.train,
                setting.sources,
                digits.PLAN,
                states,
                batch_size=1024,
                collate_fn=None,
                device=None,
                dtype=None,
            )
        )
        between = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=".") as folder:
            simulate(
                task,
                setting.train,
                setting.sources,
                digits.PLAN,
                checkpoints=states,
                out=Path(folder) / "store",
                progress=False,
            )
        ratios.append((time.perf_counter() - between) / (between - begin))
        print(f"  with a store / in memory: {ratios[-1]:.3f}", flush=True)
    return median(ratios)


def writing(megabytes: int, repetitions: int) -> tuple[float, float]:
    """Bytes per second of plain writing and syncing, and of a shard in a store with its checksum."""
    tensor = torch.randn(megabytes * 10**6 // 4)
    plain, shard = [], []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            begin = time.perf_counter()
            with (Path(folder) / "plain").open("wb") as file:
                file.write(tensor.numpy().data)
                file.flush()
                os.fsync(file.fileno())
            plain.append(tensor.nbytes / (time.perf_counter() - begin))
            begin = time.perf_counter()
            write_tensors(Path(folder) / "shard.safetensors", {"tensor": tensor})
            sha256(Path(folder) / "shard.safetensors")
            shard.append(tensor.nbytes / (time.perf_counter() - begin))
    return median(plain), median(shard)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    print(f"demo, with a store over in memory: {demo(repetitions):.3f}")
    for megabytes in (64, 256, 512):
        plain, shard = writing(megabytes, repetitions)
        print(f"{megabytes} MB: plain {plain / 1e6:.0f} MB/s, shard {shard / 1e6:.0f} MB/s, ratio {shard / plain:.2f}")


if __name__ == "__main__":
    main()
