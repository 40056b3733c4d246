"""Recordings that are damaged, cut short, hostile or of something else: each is refused with a clear error."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from imprint import Recording, RunRecorder, StoreError
from imprint.recording import journal
from imprint.store.files import sha256
from imprint.store.folder import write_sealed
from imprint.store.values import read_json
from tests.recording.runs import N, assert_same, make_model, repeat, train


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    train(folder, every=3)[1].finish()
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A sound recording of its own."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def rewrite(folder: Path, **fields: Any) -> None:
    """Change fields of the record, and seal it again."""
    content = read_json(folder / "recording.json").unsealed().content
    write_sealed(folder / "recording.json", {**content, **fields})


def rewrite_steps(folder: Path, change: Callable[[dict[str, Any]], Any], line: int = 2) -> None:
    """Change a line of the steps, with checksums that fit."""
    place = folder / "steps.jsonl"
    lines = place.read_text().splitlines()
    step = json.loads(lines[line].partition(" ")[2])
    change(step)
    text = json.dumps(step)
    lines[line] = f"{journal._checksum(text.encode())} {text}"
    place.write_text("".join(f"{each}\n" for each in lines))
    rewrite(
        folder, journal={"path": "steps.jsonl", "sha256": sha256(place), "bytes": place.stat().st_size, "rows": None}
    )


def test_a_recording_reads_back_what_was_recorded(folder: Path) -> None:
    recording = Recording(folder)
    assert recording.sha256 == Recording(folder).sha256
    assert recording.checkpoints == (0, 3, 6, 8)
    assert recording.optimiser is torch.optim.AdamW
    assert recording.groups == (tuple(name for name, _ in make_model().named_parameters()),)
    state = recording.optimiser_state(3)
    assert state.tensors["0.weight"].keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert state.tensors["0.weight"]["step"] == 3
    assert not recording.optimiser_state(0).tensors
    assert recording.data is None and recording.seed == 0 and recording.frozen == ()


def test_a_recording_is_opened_again_by_whoever_it_is_sent_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    sent = pickle.dumps(Recording(folder.name, torch.optim.AdamW))
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(sent).sha256 == Recording(folder).sha256
    assert len(sent) < 1000  # and nothing of the run is in it


def test_folders_that_are_no_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"does not exist: it has no recording\.json"):
        Recording(tmp_path / "none")
    with pytest.raises(StoreError, match="is no recording"):
        Recording(tmp_path)
    train(tmp_path / "run", stop=3)
    with pytest.raises(StoreError, match="the recording of an unfinished run"):
        Recording(tmp_path / "run")


@pytest.mark.parametrize("name", ["recording.json", "steps.jsonl"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damaged_texts_are_refused(name: str, place: float, how: str, folder: Path) -> None:
    text = bytearray((folder / name).read_bytes())
    at = int(place * (len(text) - 1))
    if how == "cut":
        del text[at:]
    else:
        text[at] ^= 1
    (folder / name).write_bytes(text)
    with pytest.raises(StoreError, match=name):
        Recording(folder)


def test_missing_and_damaged_checkpoints_are_refused(folder: Path) -> None:
    place = folder / "checkpoint-000003.safetensors"
    kept = place.read_bytes()
    place.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    recording = Recording(folder)
    with pytest.raises(StoreError, match=r"checkpoint-000003\.safetensors is damaged: it differs from its checksum"):
        recording.state(3)
    assert recording.state(6)
    place.unlink()
    with pytest.raises(StoreError, match=r"checkpoint-000003\.safetensors is missing: the recording has lost"):
        Recording(folder)


def test_steps_that_are_missing_or_stand_twice_are_refused(folder: Path) -> None:
    place = folder / "steps.jsonl"
    lines = place.read_bytes().splitlines(keepends=True)
    for changed, message in (
        (lines[:-1], "it has 7 steps, the run had 8"),
        (lines[:2] + lines[3:], "line 3 is step 4: steps are missing or stand twice"),
        ([*lines, lines[-1]], "line 9 is step 8"),
        ([*lines[:3], b"0" * 16 + b" {}\n", *lines[4:]], "is damaged in line 4"),
    ):
        place.write_bytes(b"".join(changed))
        with pytest.raises(StoreError, match=message):
            Recording(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: step["batches"][0]["examples"].append(N), "line 3 has example 24, of 24"),
        (lambda step: step["batches"][0].update(examples=[]), "line 3 has a batch without examples"),
        (lambda step: step["batches"][0].update(examples=[0.5]), r"must be a whole number of at least 0, got 0\.5"),
        (lambda step: step["batches"][0].update(normaliser=0), "normaliser must be a positive number, got 0"),
        (lambda step: step.update(batches=[]), "line 3 has a batch without examples"),
        (lambda step: step["changed"].append({}), "line 3 has 2 parameter groups, of 1"),
        (lambda step: step.update(missing=["other"]), "unknown parameter 'other'"),
        (lambda step: step.update(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda step: step.update(gradient_norm=[]), "gradient_norm must be a number of at least 0"),
        (
            lambda step: step.update(clipping={"kind": "all", "limit": 1, "norm_type": 2}),
            "'norm' or 'value', got 'all'",
        ),
        (
            lambda step: step.update(clipping={"kind": "norm", "limit": -1, "norm_type": 2}),
            "limit must be a number of at least 0, got -1",
        ),
        (
            lambda step: step.update(clipping={"kind": "norm", "limit": 1, "norm_type": "nan"}),
            "norm_type must be a positive number, got 'nan'",
        ),
        (lambda step: step.update(position=[1]), "position must be 2 values"),
        (lambda step: step.update(more=1), "it has an unknown field 'more'"),
        (lambda step: step.pop("closure"), "closure is missing"),
    ],
)
def test_hostile_steps_are_refused_by_their_place(
    change: Callable[[dict[str, Any]], Any], message: str, folder: Path
) -> None:
    rewrite_steps(folder, change)
    with pytest.raises(StoreError, match=message):
        Recording(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 99}, "recorded by a later version"),
        ({"schema": "1"}, "schema must be a whole number"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"checkpoints": []}, "do not begin at 0"),
        ({"groups": []}, "a parameter stands in its groups twice, or none does"),
        ({"groups": [["a", "a"]]}, "a parameter stands in its groups twice"),
        ({"circumstances": None}, "it is finished without steps, an end or circumstances"),
        ({"optimiser": "os.system"}, r"the optimiser os\.system, which is not one of torch\.optim: give its class"),
        ({"optimiser": "torch.optim.Optimizer"}, "not one of"),
        ({"optimiser": "torch.optim.lr_scheduler"}, "not one of"),
        ({"optimiser": "torch.optim.sgd.SGD"}, r"Recording\(folder, optimiser=SGD\)"),
    ],
)
def test_hostile_records_are_refused(fields: dict[str, Any], message: str, folder: Path) -> None:
    rewrite(folder, **fields)
    with pytest.raises(StoreError, match=message):
        Recording(folder)


def test_files_of_checkpoints_lie_in_the_folder(folder: Path) -> None:
    content = read_json(folder / "recording.json").content["checkpoints"]
    content[1]["state"]["path"] = "../run/checkpoint-000003.safetensors"
    rewrite(folder, checkpoints=content)
    with pytest.raises(StoreError, match="must be a path inside the store"):
        Recording(folder)
    content[1]["state"]["path"] = "checkpoint-000006.safetensors"
    rewrite(folder, checkpoints=content)
    with pytest.raises(StoreError, match="the checkpoint of step 3 is not in its files"):
        Recording(folder)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ('{"tensors": {"other": {"exp_avg": "0"}}, "numbers": {}}', "about an unknown parameter 'other'"),
        ('{"tensors": {"0.weight": {"exp_avg": "99"}}, "numbers": {}}', "names a tensor that it does not have"),
        ('{"tensors": {"0.weight": {"exp_avg": []}}, "numbers": {}}', "names a tensor that it does not have"),
        ('{"tensors": {}, "numbers": {"0.weight": {"x": {"call": 1}}}}', "must be a tensor, a list or a value"),
        ('{"tensors": {}}', "numbers is missing"),
        ("", "cannot be read"),
    ],
)
def test_hostile_states_of_optimisers_are_refused(about: str, message: str, folder: Path) -> None:
    place = folder / "checkpoint-000003.optimiser.safetensors"
    save_file(load_file(place), place, {"optimiser": about})
    content = read_json(folder / "recording.json").content["checkpoints"]
    content[1]["optimiser"].update(sha256=sha256(place), bytes=place.stat().st_size)
    rewrite(folder, checkpoints=content)
    with pytest.raises(StoreError, match=message):
        Recording(folder).optimiser_state(3)


class Lion(torch.optim.Optimizer):
    """An optimiser that is none of torch's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sign"] = parameter.grad.sign()
                    state["steps"] = state.get("steps", 0) + 1
                    parameter -= group["lr"] * state["sign"]


def test_another_optimiser_must_be_given(tmp_path: Path) -> None:
    model, run = train(tmp_path / "run", lambda model: Lion(model.parameters()))
    recording = run.finish()
    assert recording.optimiser is Lion
    assert recording.optimiser_state(8).numbers["0.weight"] == {"steps": 8}
    assert_same(repeat(recording, make_model(5)), model)
    with pytest.raises(StoreError, match=r"Lion, which is not one of torch\.optim: give its class, .*optimiser=Lion"):
        Recording(tmp_path / "run")
    assert Recording(tmp_path / "run", Lion).optimiser is Lion
    for wrong in (torch.optim.SGD, "Lion"):
        with pytest.raises(StoreError, match=r"recorded with the optimiser .*Lion, got|must be a class"):
            Recording(tmp_path / "run", wrong)  # type: ignore[arg-type]


def test_an_optimiser_that_remembers_more_than_its_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    optimiser.state["everything"]["count"] = 1  # type: ignore[index]
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    with pytest.raises(Exception, match="SGD, remembers something that belongs to no parameter"):
        run.step([0])


def test_steps_of_versions_that_did_not_look_for_settings_of_the_optimisers_own_are_read(folder: Path) -> None:
    assert Recording(folder).steps[2].left == ()
    for line in range(8):
        rewrite_steps(folder, lambda step: step.pop("left"), line)
    assert [step.left for step in Recording(folder).steps] == [None] * 8
