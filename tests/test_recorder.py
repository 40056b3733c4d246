"""Checkpoints kept along a training are those that imprints are simulated from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint import Plan, PlanError, Sources, StoreError, Task, attribute, simulate
from imprint.recorder import Recorder, moments_beside, second_moments

N = 12


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


class Tied(nn.Module):
    """Two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.second(self.first(x).tanh()).tanh())
        return logits


class Normed(nn.Sequential):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def train(
    model: nn.Module, recorder: Recorder, epochs: range, optimiser: torch.optim.Optimizer | None = None
) -> list[dict[str, Tensor]]:
    """A user's own loop. Gives the state after every epoch."""
    optimiser = optimiser or torch.optim.SGD(model.parameters(), 0.1)
    x, y = data()
    states = []
    for epoch in epochs:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
        recorder(model, epoch)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def scores(model: nn.Module, checkpoints: list[Path] | list[dict[str, Tensor]]) -> Tensor:
    task, sources = Task.classifier(model), Sources.per_example(N)
    store = simulate(task, data(), sources, Plan(steps=5, lr=0.1), checkpoints=checkpoints, progress=False)
    return attribute(task, store, data(), progress=False).scores


@pytest.mark.parametrize("kind", [lambda: nn.Linear(4, 3), Tied, Normed], ids=["linear", "tied", "normed"])
def test_kept_moments_are_what_imprints_are_simulated_from(kind: type[nn.Module], tmp_path: Path) -> None:
    model, recorder = kind(), Recorder(tmp_path / "checkpoints", at=(1, 3))
    states = train(model, recorder, range(1, 5))
    assert [path.name for path in recorder.paths] == ["checkpoint-000001.safetensors", "checkpoint-000003.safetensors"]
    for path, state in zip(recorder.paths, (states[0], states[2]), strict=True):
        kept = Task.classifier(model).complete(load_file(path))
        assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())
    assert torch.equal(scores(model, recorder.paths), scores(model, [states[0], states[2]]))
    assert not torch.equal(scores(model, recorder.paths), scores(model, [states[0]]))


@pytest.mark.filterwarnings("error")
def test_a_resumed_training_adds_to_what_is_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    train(model, Recorder(tmp_path, at=(1, 3, 4)), range(1, 3))
    again = nn.Linear(4, 3)
    again.load_state_dict(model.state_dict())
    resumed = Recorder(tmp_path, at=(1, 3, 4))
    train(again, resumed, range(3, 5))
    torch.manual_seed(0)
    whole = Recorder(tmp_path / "whole", at=(1, 3, 4))
    train(nn.Linear(4, 3), whole, range(1, 5))
    assert [path.name for path in resumed.paths] == [path.name for path in whole.paths]
    for one, other in zip(resumed.paths, whole.paths, strict=True):
        assert one.read_bytes() == other.read_bytes()


def names(recorder: Recorder) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in recorder.paths]


def test_a_new_training_does_not_mix_with_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    train(nn.Linear(4, 3), Recorder(tmp_path, at=(1, 2, 4)), range(1, 5))
    recorder = Recorder(tmp_path, at=(1, 3, 4))
    assert names(recorder) == [1, 4]  # it has recorded nothing itself, and lists what it would want
    with pytest.warns(UserWarning, match="holds checkpoints of an earlier training run, from 1 to 4") as warned:
        train(nn.Linear(4, 3), recorder, range(1, 4))
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert names(recorder) == [1, 3]
    train(nn.Linear(4, 3), recorder, range(4, 5))
    assert names(recorder) == [1, 3, 4]
    assert (tmp_path / "checkpoint-000002.safetensors").is_file()  # nothing is deleted


def test_a_training_that_was_set_back_replaces_what_came_later(tmp_path: Path) -> None:
    train(nn.Linear(4, 3), Recorder(tmp_path), range(1, 6))
    resumed = Recorder(tmp_path)
    with pytest.warns(UserWarning, match="from 4 to 5"):
        train(nn.Linear(4, 3), resumed, range(4, 5))
    assert names(resumed) == [1, 2, 3, 4]


def test_one_recorder_in_two_trainings_lists_the_second(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    train(nn.Linear(4, 3), recorder, range(1, 5))
    with pytest.warns(UserWarning, match="from 1 to 4"):
        train(nn.Linear(4, 3), recorder, range(1, 3))
    assert names(recorder) == [1, 2]


@pytest.mark.filterwarnings("error")
def test_a_moment_that_comes_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    recorder, model = Recorder(tmp_path), nn.Linear(2, 1)
    recorder(model, 5)
    nn.init.ones_(model.weight)
    recorder(model, 5)
    (path,) = recorder.paths
    assert torch.equal(load_file(path)["weight"], torch.ones(1, 2))


def test_moments_come_in_their_order_however_large(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for moment in (0, 20, 999_999, 1_000_000):
        recorder(nn.Linear(2, 1), moment)
    assert names(recorder) == [0, 20, 999_999, 1_000_000]


def test_other_files_in_the_folder_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint-best.safetensors", ".checkpoint-000002.safetensors.tmp", "notes.txt"):
        (tmp_path / name).write_text("mine")
    recorder = Recorder(tmp_path)
    assert recorder.paths == []
    recorder(nn.Linear(2, 1), 7)
    assert [path.name for path in recorder.paths] == ["checkpoint-000007.safetensors"]


def test_there_are_no_checkpoints_before_the_first_and_no_folder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "runs" / "first", at=(2,))
    recorder(nn.Linear(2, 1), 1)
    assert recorder.paths == []
    assert not recorder.folder.exists()
    recorder(nn.Linear(2, 1), 2)
    assert len(recorder.paths) == 1


def test_recording_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model = Tied().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Recorder(tmp_path)(model, 1)
    assert model.training
    assert model.second.weight is model.first.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_moments_before_the_first_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="an epoch must be a whole number of at least 0, got -1"):
        Recorder(tmp_path)(nn.Linear(2, 1), -1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="file"):
        Recorder(tmp_path / "file")(nn.Linear(2, 1), 1)


@pytest.mark.parametrize("at", [3, "early", 1.5])
def test_moments_to_keep_are_a_list(at: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"at must be a list of epochs, such as at=\(1, 2, 4\), got "):
        Recorder(tmp_path, at=at)


@pytest.mark.parametrize("moment", [-1, 1.0, "1", None, torch.tensor(1.0)])
def test_moments_are_whole_numbers(moment: Any, tmp_path: Path) -> None:
    """1.0 would be a file that is never found again."""
    with pytest.raises(PlanError, match="an epoch must be a whole number of at least 0"):
        Recorder(tmp_path, at=(moment,))
    with pytest.raises(PlanError, match="an epoch must be a whole number of at least 0"):
        Recorder(tmp_path)(nn.Linear(2, 1), moment)
    assert not list(tmp_path.iterdir())


def test_whole_numbers_of_other_libraries_are_moments(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, at=np.array([1, 2]))
    recorder(nn.Linear(2, 1), np.int64(1))
    recorder(nn.Linear(2, 1), torch.tensor(2))
    assert names(recorder) == [1, 2]


def test_a_recorder_takes_the_model_first(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 1)
    with pytest.raises(PlanError, match=r"recorder\(model, epoch\), got a first argument of type int"):
        Recorder(tmp_path)(1, model)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="give the model itself, not its state dict"):
        Recorder(tmp_path)(model.state_dict(), 1)


def test_a_recorder_says_what_it_keeps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, at=(4, 1))
    recorder(nn.Linear(2, 1), 1)
    assert repr(recorder) == f"Recorder({str(tmp_path)!r}, at 1, 4: 1 saved)"
    assert repr(Recorder(tmp_path / "new")) == f"Recorder({str(tmp_path / 'new')!r}, every epoch: 0 saved)"


def test_simulating_from_a_recorder_itself_or_from_no_moment_says_what_to_give(tmp_path: Path) -> None:
    model, recorder = nn.Linear(4, 3), Recorder(tmp_path, at=(100,))
    train(model, recorder, range(1, 3))
    with pytest.raises(PlanError, match=r"not of type Recorder: give its \.paths"):
        scores(model, recorder)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"checkpoints is empty: .*where none of its moments was reached"):
        scores(model, recorder.paths)


# --- second moments


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("model", [nn.Linear(4, 3), Tied()], ids=["linear", "tied"])
def test_second_moments_are_those_of_the_optimiser_without_their_bias(
    kind: type[torch.optim.Adam], model: nn.Module, tmp_path: Path
) -> None:
    optimiser = kind(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    recorder = Recorder(tmp_path, at=(1, 3), optimiser=optimiser)
    train(model, recorder, range(1, 4), optimiser)
    assert names(recorder) == [1, 3]
    kept = load_file(moments_beside(recorder.paths[-1]))
    assert kept.keys() == dict(model.named_parameters()).keys()  # which has tied weights once
    for name, parameter in model.named_parameters():
        about = optimiser.state[parameter]
        torch.testing.assert_close(kept[name], about["exp_avg_sq"] / (1 - 0.95**3))
    first = load_file(moments_beside(recorder.paths[0]))
    assert all(bool((kept[name] != first[name]).any()) for name in kept)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_second_moments_are_what_divides_the_steps_of_adam(amsgrad: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, amsgrad=amsgrad)
    x, y = data()
    for scale in (3.0, 1.0, 0.1, 0.1):  # so that the largest of the past is not the latest
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimiser.zero_grad()
        (scale * nn.functional.cross_entropy(model(x.double()), y)).backward()
        optimiser.step()
    for name, moments in second_moments(model, optimiser).items():
        parameter = model.get_parameter(name)
        mean = optimiser.state[parameter]["exp_avg"] / (1 - 0.9**4)
        expected = before[name] - 0.1 * mean / (moments.sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-12)


def test_simulations_find_the_second_moments_that_were_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = Recorder(tmp_path, at=(2, 4), optimiser=optimiser)
    train(model, recorder, range(1, 5), optimiser)
    task, sources = Task.classifier(model), Sources.per_example(N)
    plan = Plan(steps=5, preconditioner="adam")
    store = simulate(task, data(), sources, plan, checkpoints=recorder.paths, progress=False)
    assert [checkpoint.measured.moments for checkpoint in store.checkpoints] == ["recorded", "recorded"]
    assert all(store.manifest.request.moments)
    pair = (recorder.paths[1], second_moments(model, optimiser))
    again = simulate(task, data(), sources, plan, checkpoints=[recorder.paths[0], pair], progress=False)
    assert again.manifest.request == store.manifest.request


def test_files_of_second_moments_are_no_checkpoints(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimiser = torch.optim.Adam(model.parameters())
    recorder = Recorder(tmp_path, optimiser=optimiser)
    train(model, recorder, range(1, 3), optimiser)
    assert len(list(tmp_path.iterdir())) == 4
    assert names(recorder) == [1, 2]
    assert names(Recorder(tmp_path)) == [1, 2]


def test_parameters_without_a_gradient_have_no_second_moments(tmp_path: Path) -> None:
    model = Tied()
    model.out.weight.requires_grad_(False)
    optimiser = torch.optim.Adam(model.parameters())
    recorder = Recorder(tmp_path, optimiser=optimiser)
    recorder(model, 0)  # before the first step there are none at all
    assert not moments_beside(recorder.paths[0]).exists()
    train(model, recorder, range(1, 2), optimiser)
    kept = load_file(moments_beside(recorder.paths[1]))
    assert kept.keys() == dict(model.named_parameters()).keys() - {"out.weight"}


def test_second_moments_are_there_before_their_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in between, a recording leaves no checkpoint that has no moments, or those of another."""
    model = nn.Linear(4, 3)
    optimiser = torch.optim.Adam(model.parameters())
    recorder = Recorder(tmp_path, optimiser=optimiser)
    train(model, recorder, range(1, 2), optimiser)
    (place,) = recorder.paths
    before = moments_beside(place).read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("imprint.recorder.save_model", killed)
        with pytest.raises(KeyboardInterrupt):
            train(model, recorder, range(1, 2), optimiser)
    assert moments_beside(place).read_bytes() != before
    assert not place.exists()
    train(model, recorder, range(1, 2), optimiser)
    assert place.exists()


def test_a_checkpoint_that_is_written_anew_without_an_optimiser_loses_the_moments_of_the_earlier_one(
    tmp_path: Path,
) -> None:
    model = nn.Linear(4, 3)
    optimiser = torch.optim.Adam(model.parameters())
    train(model, Recorder(tmp_path, optimiser=optimiser), range(1, 2), optimiser)
    recorder = Recorder(tmp_path)
    with pytest.warns(UserWarning, match="of an earlier training"):
        train(model, recorder, range(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001.safetensors"]


class Lion(torch.optim.Optimizer):
    """An optimiser with betas that keeps no second moments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.grad


def test_optimisers_without_second_moments_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    for given in (torch.optim.SGD(model.parameters(), 0.1), "adam", model):
        with pytest.raises(PlanError, match="optimiser must be Adam, AdamW or another with betas"):
            Recorder(tmp_path, optimiser=given)  # type: ignore[arg-type]
    lion = Lion(model.parameters())
    with pytest.raises(PlanError, match="Lion, keeps no second moments: of parameter 'weight' it has exp_avg, where"):
        train(model, Recorder(tmp_path, optimiser=lion), range(1, 2), lion)
    with pytest.raises(PlanError, match="has none of the model's parameters"):
        Recorder(tmp_path, optimiser=torch.optim.Adam(nn.Linear(4, 3).parameters()))(model, 1)
    assert not list(tmp_path.iterdir())
