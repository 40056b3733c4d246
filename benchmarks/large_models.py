"""How large a model can be whose LoRA fine-tune is replayed: peak memory, and a replay step beside a training step.

    python benchmarks/large_models.py --device cuda            # growing models, until one does not fit
    python benchmarks/large_models.py --device cuda --stacked  # without checkpointing, sources together
    python benchmarks/large_models.py --small                  # tiny ones on the CPU, in a minute

Llamas with random weights, in bfloat16, under a float32 adapter on every linear layer, with gradient checkpointing. A
few steps of AdamW are recorded, and the run is replayed without each of 16 sources. All sources share the one base:
memory beyond that of training would be a copy of it. Steps are medians of plain training steps and of steps of the
replay that take turns; "replayed in" is all of `simulate`: the replays of sources and of two perturbed starts, the hash
of the base, and every check.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import imprint
from imprint import language
from imprint.data import Data
from imprint.errors import ReliabilityWarning
from imprint.runtime.memory import Peak
from imprint.simulation.engines.replay.rows import Lineup
from imprint.simulation.engines.replay.stack import Stack
from imprint.simulation.engines.replay.training import Repetition, Training, as_recorded
from imprint.tensors.vectors import repeated

SOURCES, EXAMPLES, STEPS, RANK = 16, 16, 4, 16  # every source has an example
BATCH = EXAMPLES // STEPS
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Size:
    """The shape of a Llama: layers, width, width inside a block, heads, and tokens it knows."""

    name: str
    layers: int
    width: int
    inside: int
    heads: int
    vocabulary: int = 32000


SIZES = (
    Size("0.6 B", 16, 1536, 4096, 16),
    Size("1.3 B", 24, 2048, 5504, 16),
    Size("3 B", 26, 3072, 8192, 24),
    Size("7 B", 32, 4096, 11008, 32),
    Size("13 B", 40, 5120, 13824, 40),
    Size("33 B", 60, 6656, 17920, 52),
    Size("65 B", 80, 8192, 22016, 64),
    Size("100 B", 96, 9216, 24576, 72),
)
SMALL = (Size("tiny", 2, 32, 64, 2, 100), Size("small", 3, 64, 128, 4, 100))


@dataclass(frozen=True)
class Found:
    """What was measured of a model; seconds of a step, bytes at most allocated."""

    name: str
    parameters: int
    adapter: int
    base_bytes: int
    training_step: float
    replay_step: float
    rows: int
    training_bytes: int
    replay_bytes: int
    replay_seconds: float
    one_by_one: str | None


@contextmanager
def half_precision() -> Iterator[None]:
    """Make parameters in bfloat16 from the beginning, so that no copy in float32 is ever there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def log_time(what: str) -> Iterator[None]:
    """Print how long something took, for those who wait and for a run that is stopped."""
    begin = time.monotonic()
    yield
    print(f"{what} in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def build(size: Size, device: torch.device, length: int, *, checkpointed: bool) -> Any:
    """A Llama with an adapter that is to be trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inside,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=length,
        use_cache=False,
    )
    with half_precision(), device:
        base: Any = LlamaForCausalLM(config)
    if checkpointed:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS)).train()


def record(model: Any, task: imprint.Task, data: Data, folder: Path) -> imprint.Recording:
    """Train a few steps with a recorder."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    run = imprint.RunRecorder(folder, model, optimiser, n=EXAMPLES)
    for indices in run.batches(EXAMPLES, BATCH, epochs=1):
        with run.step(indices) as step:
            optimiser.zero_grad()
            step.backward(task.loss(model, data.gather(indices)).mean())
            optimiser.step()
    return run.finish()


def measure(size: Size, device: torch.device, length: int, *, stacked: bool) -> Found:
    """Record, replay and time one model."""
    with log_time(f"{size.name}: built"):
        model = build(size, device, length, checkpointed=not stacked)
    task = language.task(model)
    ids = torch.randint(0, size.vocabulary, (EXAMPLES, length), generator=torch.Generator().manual_seed(1))
    columns = {"input_ids": ids.to(device), "labels": ids.to(device)}
    data, sources = (
        Data(columns, device=device),
        imprint.Sources.groups({f"{index}": [index] for index in range(SOURCES)}),
    )
    with tempfile.TemporaryDirectory() as name:
        peak = Peak(device)
        with log_time("recorded"):
            recording = record(model, task, data, Path(name) / "run")
        training_bytes = peak.bytes or 0
        plan, peak, begin = imprint.Plan(engine="replay", stacked=stacked), Peak(device), time.monotonic()
        with log_time("replayed"):
            store = imprint.simulate(task, columns, sources, plan, run=recording)
        replay_seconds, replay_bytes = time.monotonic() - begin, peak.bytes or 0
        one_by_one = store.checkpoints[0].measured.one_by_one
        rows = 1 if one_by_one is not None else len(Lineup(sources, seed=0, control=True).rows)
        training_step, replay_step = time_steps(Repetition(task, data, recording), sources, rows)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return Found(
        size.name,
        sum(p.numel() for p in frozen),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() * p.itemsize for p in frozen),
        training_step,
        replay_step,
        rows,
        training_bytes,
        replay_bytes,
        replay_seconds,
        one_by_one,
    )


def time_steps(repetition: Repetition, sources: imprint.Sources, rows: int) -> tuple[float, float]:
    """Return the median seconds of a plain training step and of a step of the replay, per row; they take turns."""
    plain = Training(repetition)
    replayed: Training | Stack = Training(repetition, np.isin(np.arange(EXAMPLES), sources.members[0]))
    if rows > 1:
        lineup = Lineup(sources).rows.padded(rows)
        replayed = Stack(repetition, lineup, repeated(repetition.start(), rows), plain_attention=True)
    taken: tuple[list[float], list[float]] = ([], [])
    with as_recorded(repetition.run.circumstances):
        for number in repetition.steps:
            for each, times in zip((plain, replayed), taken, strict=True):
                begin = _now(repetition.data.device)
                each.step(number)
                times.append(_now(repetition.data.device) - begin)
    return median(taken[0][1:]), median(taken[1][1:]) / rows


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def format_row(found: Found) -> str:
    """Format what was found as a row of the table."""
    cells = [
        found.name,
        f"{found.parameters:,}",
        f"{found.adapter:,}",
        f"{found.base_bytes / 2**30:.2f} GiB",
        f"{found.training_step:.3f} s",
        f"{found.replay_step:.3f} s",
        f"{found.replay_step / found.training_step:.2f}",
        f"{found.rows}",
        f"{found.training_bytes / 2**30:.2f} GiB",
        f"{found.replay_bytes / 2**30:.2f} GiB",
        f"{found.replay_seconds:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--stacked", action="store_true", help="all rows at once, without gradient checkpointing")
    parser.add_argument("--tokens", type=int, help="of an example: 512, or 16 of small models")
    names = [size.name for size in SIZES]
    parser.add_argument("--sizes", nargs="+", choices=names, default=names, help="the models, instead of all")
    parser.add_argument("--json", type=Path, help="write everything measured to a file")
    options = parser.parse_args()
    if not options.small and options.device == "cpu":
        parser.error("these models need a GPU: give --device cuda, or --small")
    device, length = torch.device(options.device), options.tokens or (16 if options.small else 512)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, where peaks are of the whole process"
    print(f"{where}, torch {torch.__version__}; batches of {BATCH} examples of {length} tokens, {STEPS} steps")
    print(
        "| model | parameters | adapter | base | training step | replay step, per row | ratio | rows at once ", end=""
    )
    print("| peak of training | peak of replay | replayed in |\n|---|" + "---:|" * 10, flush=True)
    results: list[Found] = []
    warnings.simplefilter("ignore", ReliabilityWarning)  # nobody reads these effects
    for size in SMALL if options.small else [size for size in SIZES if size.name in options.sizes]:
        try:
            found = measure(size, device, length, stacked=options.stacked)
        except torch.OutOfMemoryError as error:
            print(f"{size.name} does not fit: {str(error).split('. ')[0]}.")
            break
        results.append(found)
        print(format_row(found), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if results and results[-1].one_by_one:
        print(f"Sources were replayed in turn: {results[-1].one_by_one}.")
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for found in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
