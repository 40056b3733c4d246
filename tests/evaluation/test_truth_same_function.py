"""A folder is continued by the function that began it, and by no other."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import StoreError
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Train
from imprint.evaluation.trials import describe_function, spread
from tests.evaluation.truths import (
    EXTRA,
    RUNS,
    Killed,
    ask,
    build,
    contents,
    every_kind,
    named,
    nudged,
    task,
    train,
    unseeded,
)


def begun(folder: Path, how: Train, models: int, **given: Any) -> None:
    """A truth with so many models of a function."""
    calls = iter(range(models + EXTRA))

    def dying(subset: Tensor, seed: int) -> nn.Module:
        if next(calls, None) is None:
            raise Killed
        return how(subset, seed)

    with pytest.raises(Killed):
        ask(folder, named(dying), **given)


@pytest.mark.parametrize("models", [2, 5, 9])
def test_a_folder_is_not_continued_by_another_function_of_the_same_name(models: int, tmp_path: Path) -> None:
    begun(tmp_path, train, models)
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match=r"of another train\(subset, seed\): F of model 0, trained again, differs"):
        ask(tmp_path, nudged(0.5))
    assert contents(tmp_path) == kept
    ask(tmp_path, nudged(0.0))
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match=r"of another train\(subset, seed\): F of model 0, trained again, differs"):
        ask(tmp_path, nudged(0.5))  # though nothing is left to train
    assert contents(tmp_path) == kept


def test_a_small_deviation_is_said_and_a_tiny_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size in (1e-6, 1e-2):
        begun(tmp_path / str(size), train, 5)
        assert not caplog.text
        ask(tmp_path / str(size), nudged(size))
    assert "does not exactly reproduce the models in" in caplog.text


def test_a_function_that_never_repeats_itself_may_still_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    begun(tmp_path, unseeded, 5)
    assert ask(tmp_path, named(lambda subset, seed: unseeded(subset, seed))).runs == RUNS


def test_effects_are_compared_within_a_run() -> None:
    """Runs of a removal differ by much more than what is removed does."""
    rows = torch.tensor([[1.0], [1.1], [1.2], [9.0], [9.1], [9.2]])
    assert spread(dict(enumerate(rows)), 3) == pytest.approx(0.1)
    assert spread(dict(enumerate(rows)), 1) is None
    assert spread({0: rows[0], 3: rows[3]}, 3) is None
    assert spread({0: rows[0], 1: rows[1], 3: rows[3]}, 3) == pytest.approx(0.1 / 2**0.5)


def output(model: nn.Module, batch: Any) -> Tensor:
    """An F that is moved by exactly what `nudged` is given."""
    values: Tensor = model(batch[0])[:, 0]
    return values


def asked_again(folder: Path, how: Train, refused: bool, **given: Any) -> None:
    if refused:
        with pytest.raises(StoreError, match="of another train"):
            ask(folder, how, **given)
    else:
        ask(folder, how, **given)


@pytest.mark.parametrize(("size", "refused"), [(0.8, False), (1.2, True)])
@every_kind
def test_the_limit_is_a_tenth_of_what_the_subsets_of_a_run_differ_by(
    subsets: Subsets, size: float, refused: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"subsets": subsets, "task": task(measure=output)}
    truth = ask(tmp_path, nudged(0.0), **given)
    among = float(truth.values.var(1).mean().sqrt())
    asked_again(tmp_path, nudged(size * 0.1 * among), refused, **given)


@pytest.mark.parametrize(("size", "refused"), [(2.5, False), (3.5, True)])
def test_a_function_may_be_off_by_three_times_its_own_noise(size: float, refused: bool, tmp_path: Path) -> None:
    calls, own = iter(range(10**6)), task(measure=output)

    def restless(subset: Tensor, seed: int) -> nn.Module:
        return nudged(float(next(calls) == 1))(subset, seed)  # the second training is the first again

    assert ask(tmp_path, named(restless), task=own).about["noise"] == pytest.approx(1.0)
    asked_again(tmp_path, nudged(size), refused, task=own)


@pytest.mark.parametrize(("size", "refused"), [(1e-5, False), (0.05, True)])
def test_one_kept_model_must_be_the_same_to_a_thousandth(size: float, refused: bool, tmp_path: Path) -> None:
    begun(tmp_path, train, 1, runs=1)
    if refused:
        with pytest.raises(StoreError, match=r"trained again, differs by .*, where it is"):
            ask(tmp_path, nudged(size), runs=1)
    else:
        ask(tmp_path, nudged(size), runs=1)


def test_a_function_with_arguments_bound_is_known_by_them(tmp_path: Path) -> None:
    def scaled(factor: float, subset: Tensor, seed: int, *, shift: float = 0.0) -> nn.Module:
        model = train(subset, seed)
        model.get_parameter("2.bias").data.mul_(factor).add_(shift)
        return model

    ask(tmp_path, partial(scaled, 1.0, shift=0.0))
    name = re.escape(scaled.__qualname__)
    with pytest.raises(StoreError, match=rf"training was {name}\(1\.0, shift=0\.0\), is {name}\(1\.0, shift=0\.5\)"):
        ask(tmp_path, partial(scaled, 1.0, shift=0.5))
    assert describe_function(partial(describe_function, build)) == "describe_function(<function build>)"
