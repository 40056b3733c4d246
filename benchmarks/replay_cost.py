"""What a replay takes, against the same trainings in a plain loop: a ratio per optimiser and precision.

    python benchmarks/replay_cost.py                          # digits, a 64-32-10 perceptron, on the CPU
    python benchmarks/replay_cost.py --device cuda            # Shakespeare, a character GPT, in float32
    python benchmarks/replay_cost.py --device cuda --autocast bfloat16

Both are made in one process, one after the other, several times; figures are medians. The plain loop trains 24 models
as a user would, each without one source; with --plain 6 it trains six of them, and its time is multiplied by four. The
replay is the whole of `simulate`: the run as it was, 24 removals, three further rows, the figures and the store. Peak
memory is set beside what `check` has said.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import imprint
from imprint.batches import Batch
from imprint.benchmarking.settings import characters, digits
from imprint.data import Data
from imprint.runtime.memory import Peak

SOURCES = 24


@dataclass(frozen=True)
class Case:
    """A training that is timed: a model, its data and its optimiser."""

    name: str
    task: imprint.Task
    data: Any
    optimiser: Callable[[Any], torch.optim.Optimizer]
    batch: int
    steps: int
    autocast: torch.dtype | None = None

    @property
    def n(self) -> int:
        return len(Data(self.data, device=self.task.device))

    @property
    def sources(self) -> imprint.Sources:
        return imprint.Sources.by_label([example % SOURCES for example in range(self.n)])

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        device = self.task.device.type
        with torch.autocast(device, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            return self.task.loss(model, batch)

    def record(self, folder: Path) -> tuple[imprint.Task, imprint.Recording]:
        """Train once with a recorder."""
        model, data = copy.deepcopy(self.task.model).train(), Data(self.data, device=self.task.device)
        optimiser = self.optimiser(model.parameters())
        run = imprint.RunRecorder(folder, model, optimiser, n=self.n)
        for step_number, indices in enumerate(run.batches(self.n, self.batch, epochs=1000, drop_last=True)):
            if step_number == self.steps:
                break
            with run.step(indices) as step:
                optimiser.zero_grad()
                step.backward(self.losses(model, data.gather(indices)).mean())
                optimiser.step()
        recording = run.finish()
        self.task.model.load_state_dict(model.state_dict())
        return self.task, recording

    def train_plainly(self, start: dict[str, Tensor], recording: imprint.Recording, count: int) -> None:
        """Train one model without each of the first sources, one after the other, as a user's own loop would."""
        data, device = Data(self.data, device=self.task.device), self.task.device
        order = [torch.tensor(step.batches[0].examples) for step in recording.steps]
        owners = torch.arange(self.n) % SOURCES
        for source in range(count):
            weights = (owners != source).float().to(device)
            model = copy.deepcopy(self.task.model).train()
            model.load_state_dict(start)
            optimiser = self.optimiser(model.parameters())
            for indices in order:
                optimiser.zero_grad()
                losses = self.losses(model, data.gather(indices))
                ((weights[indices.to(device)] * losses).sum() / len(indices)).backward()
                optimiser.step()


def measure(case: Case, repeats: int, count: int) -> dict[str, Any]:
    """Time both ways several times; compare peak memory and time with what `check` says."""
    start = copy.deepcopy(case.task.model.state_dict())
    ratios, plain, replayed = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        task, recording = case.record(Path(folder) / "run")
        said = imprint.check(task, case.data, case.sources, run=recording).estimate
        assert said is not None
        for _ in range(repeats):
            taken = _seconds(case, lambda: case.train_plainly(start, recording, count))
            plain.append(taken * SOURCES / count)
            peak = Peak(task.device)
            replayed.append(
                _seconds(case, lambda: imprint.simulate(task, case.data, case.sources, run=recording, progress=False))
            )
            ratios.append(replayed[-1] / plain[-1])
    return {
        "case": case.name,
        "ratio": median(ratios),
        "plain_seconds": median(plain),
        "replay_seconds": median(replayed),
        "check_seconds": said.seconds,
        "peak_bytes": peak.bytes,
        "check_peak_bytes": said.peak_bytes,
        "one_by_one": said.one_by_one,
    }


def _seconds(case: Case, call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    if case.task.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begin


def digits_cases(steps: int) -> list[Case]:
    """A small perceptron, on the CPU."""
    optimisers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    }
    cases = []
    for name, optimiser in optimisers.items():
        torch.manual_seed(0)
        data, task = digits.load(0).train, imprint.Task.classifier(digits.model())
        cases += [Case(f"digits, {name}, batch {batch}", task, data, optimiser, batch, steps) for batch in (32, 100)]
    return cases


def language_cases(device: str, autocast: str | None, steps: int) -> list[Case]:
    """The character GPT on Shakespeare, with the training of its setting."""
    text, training = characters.load(), characters.TRAINING
    torch.manual_seed(0)
    how = characters.together(text.train, training, device)
    columns = {name: column.to(device) for name, column in text.train.items()}
    dtype = None if autocast is None else getattr(torch, autocast)

    def optimiser(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=training.lr, betas=training.betas)

    task = how.task_of(how.build().to(device))
    name = f"Shakespeare, {autocast or 'float32'}"
    return [Case(name, task, columns, optimiser, training.batch_size, steps, dtype)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", choices=("bfloat16",))
    parser.add_argument("--steps", type=int, help="of each training: 600 of the perceptron, 100 of the GPT-2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", type=int, default=SOURCES, help="how many of the plain trainings are made")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    steps = options.steps or (600 if cpu else 100)
    cases = digits_cases(steps) if cpu else language_cases(options.device, options.autocast, steps)
    results = []
    for case in cases:
        found = measure(case, options.repeats, options.plain)
        results.append(found)
        memory = f"peak {found['peak_bytes'] / 2**20:.0f} MiB (check: {found['check_peak_bytes'] / 2**20:.0f})"
        print(
            f"{case.name:28s} {found['ratio']:.2f} of a plain loop: {found['replay_seconds']:.1f} s (check: "
            f"{found['check_seconds']:.1f}) against {found['plain_seconds']:.1f} s, {memory}",
            flush=True,
        )
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
