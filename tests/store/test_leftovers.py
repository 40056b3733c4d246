"""What a simulation leaves behind: when it has ended, when it has failed, and of batches that files cannot keep."""

import gc
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint import Plan, SimulationError, Sources, Store, StoreError, Task, simulate
from imprint.simulation.engines.paths import PathEngine
from tests.store.sharded import SOURCES, N, columns, new_task, simulated


def test_a_temporary_store_vanishes_with_its_object() -> None:
    store = simulated(new_task(), None)
    path = store.path
    assert (path / "manifest.json").is_file()
    del store
    gc.collect()
    assert not path.exists()


def test_a_temporary_store_vanishes_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    store = simulated(new_task(), None)
    recwarn.clear()
    del store
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_a_kept_store_outlives_its_object(tmp_path: Path) -> None:
    store = simulated(new_task(), tmp_path / "deep" / "store")
    del store
    gc.collect()
    assert len(Store(tmp_path / "deep" / "store")) == 5


def _failing(after: int) -> Task:
    """A task whose loss is not finite any more after some calls."""
    calls = 0

    def output_loss(z: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return z.square().sum(1) * (torch.nan if calls > after else 1.0)

    return Task(nn.Linear(3, 2), outputs=lambda model, batch: model(batch[0]), output_loss=output_loss)


@pytest.mark.parametrize("after", [0, 40], ids=["at once", "later"])
def test_a_failed_simulation_leaves_no_folder_behind(after: int, tmp_path: Path) -> None:
    with pytest.raises(SimulationError):
        simulate(
            _failing(after), columns(N, 1), SOURCES, Plan(steps=50, lr=0.1), out=tmp_path / "store", progress=False
        )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_only_an_interruption_keeps_the_steps_that_were_chosen(error: type[BaseException], tmp_path: Path) -> None:
    """Before the first file; other errors leave the folder as it was."""

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        simulated(new_task(), tmp_path / "store", progress=stop)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    interrupted = error is not RuntimeError
    assert left == (["unfinished.json"] if interrupted else [])
    assert (tmp_path / "store").exists() == interrupted
    assert simulated(new_task(), tmp_path / "store").manifest.cost.resumed == interrupted


def test_an_interruption_before_steps_are_chosen_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PathEngine, "settle", interrupt)
    with pytest.raises(KeyboardInterrupt):
        simulated(new_task(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_failed_simulation_keeps_a_folder_that_was_there_before(tmp_path: Path) -> None:
    with pytest.raises(SimulationError):
        simulate(_failing(0), columns(N, 1), SOURCES, Plan(steps=2, lr=0.1), out=tmp_path, progress=False)
    assert tmp_path.exists()
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_may_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    assert len(simulated(new_task(), tmp_path / "store")) == 5


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imprint.store.files.save_file", no_space)
    with pytest.raises(StoreError, match=r"could not write .*base\.safetensors.*No space left"):
        simulated(new_task(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def _plain(data: Any, loss: Any, **options: Any) -> Store:
    plan, each = Plan(steps=2, lr=0.1), Sources.per_example(N)
    return simulate(Task(nn.Linear(3, 2), loss), data, each, plan, progress=False, **options)


def test_a_batch_may_hold_the_same_tensor_twice() -> None:
    x, y = columns(N, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]) + model(batch["same"]), batch["y"], reduction="none")

    samples = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]

    def collate(samples: list[Any]) -> Any:
        rows = torch.stack([sample["x"] for sample in samples])
        return {"x": rows, "same": rows, "y": torch.stack([sample["y"] for sample in samples])}

    store = _plain(samples, loss, collate_fn=collate)
    probes = list(load_file(store.path / "probes.safetensors").values())
    assert len(probes) == 3 and sum(torch.equal(a, b) for a, b in itertools.combinations(probes, 2)) == 1


@pytest.mark.parametrize("odd", [math.inf, math.nan, 10**30, "half of \ud83d"], ids=str)
def test_examples_that_json_cannot_keep_mean_no_probes(odd: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def collate(samples: list[Any]) -> Any:
        return (*torch.utils.data.default_collate(samples), [odd])

    samples = list(zip(*columns(N, 1), strict=True))
    assert _plain(samples, loss, collate_fn=collate).manifest.probes is None
    assert _plain(samples, loss).manifest.probes is not None
