"""The scripts of the cost model run from end to end on tiny models, and the profiles that are kept can be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from imprint.advice.devices import Device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROFILES = sorted((BENCHMARKS / "profiles").glob("*.json"))
COMPANY = ["--parameters", "7e9", "--layers", "32", "--width", "4096", "--tokens", "2e9"]


def run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_constant_of_a_kept_profile_has_a_source(profile: Path) -> None:
    device = Device.load(profile)
    assert device.rates_source and device.forward_rates and device.training_rates
    assert all(each.value > 0 for each in device.constants.values())


@pytest.mark.wide
def test_a_device_is_measured_checked_and_asked(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    measured = run("cost_model.py", "measure", "--small", "--repeats", "1", "--out", str(file))
    assert run("cost_model.py", "check", str(file)) == measured
    assert "held out: " in measured and "| replay, stacked |" in measured
    content = json.loads(file.read_text())
    assert {point["operation"] for point in content["points"]} >= {"training", "tangent", "spectral", "readout"}


@pytest.mark.wide
def test_a_company_is_told_what_is_within_reach() -> None:
    told = run(
        "cost_model.py", "predict", str(BENCHMARKS / "profiles" / "h200.json"), *COMPANY, "--sources", "1000",
        "--queries", "1e9", "--gpus", "8",
    )  # fmt: skip
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("| ")][1:]
    assert {row[0] for row in rows} >= {"training", "repeating the run", "simulation, tangent", "readout, jvp"}
    for row in rows:
        assert (int(row[3].replace(",", "")) <= 8) == (row[6] == "yes")


@pytest.mark.wide
@pytest.mark.parametrize("how", [[], ["--stacked"]])
def test_large_models_are_measured_on_small_ones(how: list[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run("large_models.py", "--small", *how, "--json", str(file))
    found = json.loads(file.read_text())
    assert [each["name"] for each in found] == ["tiny", "small"]
    for each in found:
        assert each["base_bytes"] == 2 * each["parameters"]
        assert (each["rows"] > 1) == bool(how) == (each["one_by_one"] is None)
