"""The memory that a check foretells for a replay is what the replay then takes, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak of a process cannot be set back"),
]

# Wide layers: what the process takes before anything is replayed must not hide what the replay adds.
SCRIPT = """
import json, sys, warnings
from pathlib import Path
import torch
from torch import nn
import imprint
from imprint.benchmarking.settings import digits
from imprint.runtime.memory import Peak

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
phase, folder, width, norm = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "norm"
x, y = digits.load(0).train
between = [nn.BatchNorm1d(width)] if norm else []
model = nn.Sequential(nn.Linear(64, width), *between, nn.ReLU(), nn.Linear(width, 10))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = imprint.RunRecorder(folder / phase, model, optimiser)
for indices in run.batches(160, 16, epochs=1):
    with run.step(indices) as step:
        optimiser.zero_grad()
        step.backward(nn.functional.cross_entropy(model(x[indices]), y[indices]))
        optimiser.step()
task, data, before = imprint.Task.classifier(model), (x[:160], y[:160]), Peak(torch.device("cpu")).bytes
given = (task, data, imprint.Sources.by_label([i % 24 for i in range(160)]))
if phase == "check":
    found = imprint.check(*given, run=run)
    assert found.ok and found.estimate is not None, found.problems
    peak, alone = found.estimate.peak_bytes, found.estimate.one_by_one
else:
    store = imprint.simulate(*given, run=run, progress=False, out=folder / "store")
    peak, alone = store.manifest.cost.peak_bytes, store.checkpoints[0].measured.one_by_one
print(json.dumps({"before": before, "peak": peak, "alone": alone}))
"""


def _measure(phase: str, folder: Path, norm: str) -> dict[str, int]:
    command = [sys.executable, "-c", SCRIPT, phase, str(folder), "16384", norm]
    found: dict[str, int] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.parametrize("norm", ["plain", "norm"])
def test_the_memory_of_a_replay_is_known_beforehand(norm: str, tmp_path: Path) -> None:
    said, taken = (_measure(phase, tmp_path, norm) for phase in ("check", "simulate"))
    assert bool(said["alone"]) == bool(taken["alone"]) == (norm == "norm")  # the one way and the other
    assert 0.7 < said["peak"] / taken["peak"] < 1.3
    added = [each["peak"] - each["before"] for each in (said, taken)]
    assert added[1] > 100e6 and 0.6 < added[0] / added[1] < 1.6
