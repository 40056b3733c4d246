"""What a query takes when every training example is a source, against the numbers of queries and of examples.

    python benchmarks/query_scaling.py
    python benchmarks/query_scaling.py --device cuda

A perceptron 784-128-64-10 on random data, one checkpoint, 200 directions: the same sizes as MNIST's, whose values do
not matter for cost. Log–log slopes over the upper half of each range stand beside the O(2|Q||B|) evaluations of the
paper's readout; dattri's TRAK of one model is timed beside them where it is installed. Medians of repeated calls in one
process: their ratios can be compared.
"""

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from simulation_cost import slope
from torch import Tensor, nn

import imprint
from imprint.plan import Form
from imprint.readout.kernels import ReadoutName
from imprint.readout.reader import Reader

EXAMPLES = (625, 1250, 2500, 5000)
QUERIES = (1, 4, 16, 64, 256)
READINGS: dict[str, tuple[Form, ReadoutName]] = {
    "factored, jvp": ("factored", "jvp"),
    "factored, gradient": ("factored", "gradient"),
    "projected, jvp": ("projected", "jvp"),
    "projected, gradient": ("projected", "gradient"),
    "dense, jvp": ("dense", "jvp"),
    "dense, gradient": ("dense", "gradient"),
}


def data(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, y = torch.randn(count, 784, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    return x.to(device), y.to(device)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of so many calls, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def trak(task: imprint.Task, examples: int, device: torch.device) -> Callable[[tuple[Tensor, Tensor]], object] | None:
    """dattri's TRAK of one model, made ready for queries; None where dattri is not installed."""
    try:
        from imprint.benchmarking.peers import DattriTask, make_loader
    except ImportError:
        return None
    attributor = DattriTask(task).trak([task.state()])
    attributor.cache(make_loader(data(examples, device), 500))
    return lambda queries: attributor.attribute(make_loader(queries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    task = imprint.Task.classifier(perceptron().to(device), measure="margin")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, torch {torch.__version__}; milliseconds for all queries at once, and the store")
    stores = {
        (form, count): imprint.simulate(
            task,
            data(count, device),
            imprint.Sources.per_example(count),
            imprint.Plan(engine="spectral", steps="infinite", damping=0.1, directions=200, form=form),
            progress=False,
        )
        for form in sorted({form for form, _ in READINGS.values()})
        for count in EXAMPLES
    }
    head = " ".join(f"{f'|B|={count}':>8s}" for count in EXAMPLES) + "  slope  "
    head += " ".join(f"{f'|Q|={count}':>8s}" for count in QUERIES) + "  slope   store"
    print(f"{'':20s} {head}\n{'':20s} with |Q| = 16{' ' * 33}with |B| = {EXAMPLES[-1]}")

    def read(form: Form, kind: ReadoutName, examples: int, queries: int) -> float:
        reader, batch = Reader(task, stores[form, examples], readout=kind), data(queries, device)
        return median_ms(lambda: reader.scores(batch), device, options.repeats)

    rows: dict[str, Callable[[int, int], float]] = {name: partial(read, *how) for name, how in READINGS.items()}
    if trak(task, 100, device) is not None:
        rows["TRAK-1 (dattri)"] = lambda examples, queries: _trak_ms(task, examples, queries, device, options.repeats)
    for name, timed in rows.items():
        across = [timed(count, 16) for count in EXAMPLES]
        along = [timed(EXAMPLES[-1], count) for count in QUERIES]
        kept = f"{stores[READINGS[name][0], EXAMPLES[-1]].bytes / 1e6:6,.0f} MB" if name in READINGS else ""
        shown = [" ".join(f"{value:8.1f}" for value in values) for values in (across, along)]
        print(
            f"{name:20s} {shown[0]}  {slope(EXAMPLES, across):5.2f}  {shown[1]}  {slope(QUERIES, along):5.2f}  {kept}",
            flush=True,
        )


def _trak_ms(task: imprint.Task, examples: int, queries: int, device: torch.device, repeats: int) -> float:
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        ready, batch = trak(task, examples, device), data(queries, device)
        assert ready is not None
        return median_ms(lambda: ready(batch), device, repeats)


if __name__ == "__main__":
    main()
