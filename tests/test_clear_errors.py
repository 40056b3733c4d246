"""Whatever is given by mistake ends in one line that says what to do, or is taken as it was meant."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from typer.testing import CliRunner

from imprint import (
    Attribution,
    DataError,
    ImprintError,
    Plan,
    PlanError,
    ReadoutError,
    Sources,
    Store,
    StoreError,
    Task,
    TaskError,
    attribute,
    check,
    simulate,
)
from imprint.cli.app import app
from imprint.cli.inspection import inspect_store
from imprint.evaluation import Subsets, Truth, retrain
from imprint.plan import format_plan
from imprint.runtime.memory import budget
from imprint.store.values import sealed

CPU = torch.device("cpu")
N = 12


def columns(count: int = N) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 3


def classifier() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def made(out: Path | None = None, sources: Sources | None = None, **options: Any) -> Store:
    given = sources or Sources.by_label(columns()[1])
    return simulate(Task.classifier(classifier()), columns(), given, Plan(steps=1, lr=0.1), out=out, **options)


@pytest.fixture(scope="module")
def result() -> Attribution:
    return attribute(Task.classifier(classifier()), made(), columns(), progress=False)


# Models that torch can run, but not differentiate or swap parameters in.


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.words(x))


def in_float8() -> nn.Module:
    model = classifier()
    coarse = model.get_parameter("0.weight").detach().to(torch.float8_e4m3fn)
    model[0].weight = nn.Parameter(coarse, requires_grad=False)
    return model


def scripted() -> Any:
    script: Callable[[nn.Module], Any] = torch.jit.script
    return script(classifier())


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "scripted": (scripted, "give the nn.Module it was scripted from"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' is lazy .* run the model once"),
    "float8": (in_float8, r"'0.weight' has dtype float8_e4m3fn.* model.float\(\)"),
    "complex128": (lambda: classifier().to(torch.complex128), "'0.weight' is complex128.* use complex64"),
    "sparse": (Embedded, "module 'words' .* sparse gradients.* set sparse=False"),
    "no module": (lambda: F.relu, "task.s model must be a torch.nn.Module"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_simulated_is_refused_when_the_task_is_made(name: str) -> None:
    make, words = MODELS[name]
    with pytest.raises(TaskError, match=words) as caught:
        Task.classifier(make())
    assert "\n" not in str(caught.value)


def test_advice_for_models_works() -> None:
    adjusted = Embedded()
    adjusted.words.sparse = False
    for model in (in_float8().float(), adjusted):
        Task.classifier(model)


class Stream(IterableDataset[Any]):
    """Has a length, and inherits a way to be indexed that only raises."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*columns(), strict=True)


def test_an_iterable_dataset_with_a_length_is_no_map_style_dataset() -> None:
    with pytest.raises(DataError, match=r"Stream is an IterableDataset.* give a map-style dataset"):
        simulate(Task.classifier(classifier()), Stream(), Sources.per_example(N), Plan(steps=1, lr=0.1))


# Memory.


@pytest.mark.parametrize("memory", ["4", " 4 ", "2.5", 4, 1000])
def test_memory_without_a_unit_is_not_read_as_bytes(memory: Any) -> None:
    words = re.escape(f'write "{str(memory).strip()}GiB"')
    with pytest.raises(PlanError, match=words):
        budget(memory, CPU)


def test_memory_with_a_unit_is_taken_at_its_word() -> None:
    assert [budget(memory, CPU) for memory in ("4B", "4kB", "4 GiB", 4 << 20)] == [4, 4000, 4 << 30, 4 << 20]


@pytest.mark.parametrize("memory", [None, "64MiB"])
def test_fewer_examples_are_evaluated_at_once_where_memory_is_little(memory: str | None) -> None:
    """A batch of 500 has activations of 16 MB and more, of which a source's step holds several copies."""
    sizes = set()
    model = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 3))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.add(len(batch[1]))
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    task, sources = Task(model, loss, parameters="2.*"), Sources.groups({"a": [0, 1], "b": [2]})
    store = simulate(task, columns(500), sources, Plan(steps=1, lr=1e-3), memory=memory, progress=False)
    assert max(sizes) == (256 if memory else 500)
    assert store.manifest.execution.batch_size == (256 if memory else 1024)


# Results.


def test_a_table_is_not_written_as_safetensors(result: Attribution, tmp_path: Path) -> None:
    with pytest.raises(ReadoutError, match=r"saved as .safetensors, got .*x.csv'.*to_pandas\(\).to_csv"):
        result.save(tmp_path / "x.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("index", ["dune", ["dune"], 99, 1.5])
def test_indexing_by_a_source_says_how_to_select_one(result: Attribution, index: Any) -> None:
    with pytest.raises(ReadoutError, match=r"by the places of its 12 queries, got .*result.to_pandas\(\)"):
        result[index]


def test_a_folder_given_as_checkpoint_names_the_file_in_it(tmp_path: Path) -> None:
    def simulated() -> None:
        made(checkpoints=[tmp_path])

    with pytest.raises(TaskError, match=r"is a folder without model\.safetensors, .* that a Trainer .* writes\.$"):
        simulated()
    (tmp_path / "epoch-1.safetensors").touch()
    with pytest.raises(TaskError, match=r"Give a file in it, such as .*epoch-1\.safetensors\.$"):
        simulated()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TaskError, match=r"model\.safetensors cannot be read as safetensors"):
        simulated()
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(TaskError, match=r"several models \(model\.safetensors, adapter_model\.safetensors\)"):
        simulated()


def test_the_plan_line_says_what_steps_follow_and_see() -> None:
    plan = Plan(steps=9, lr=0.1, preconditioner="adam", momentum=0.9, batch_size=64, source_sample=8)
    for part in ("preconditioner adam", "momentum 0.9", "batch size 64", "source sample 8"):
        assert part in format_plan(plan)
        assert part not in format_plan(Plan(steps=9))


def test_two_sources_of_one_name_are_both_inspected(tmp_path: Path) -> None:
    sources = replace(Sources.groups({"a": range(6), "b": range(6, 10)}), names=("press", "press"))
    store = made(tmp_path / "store", sources=sources)
    assert [(each["id"], each["size"]) for each in inspect_store(store)["largest_sources"]] == [("a", 6), ("b", 4)]
    shown = CliRunner().invoke(app, ["inspect", str(store.path)], env={"COLUMNS": "200"}).output
    assert "press, id a (6), press, id b (4)" in shown


@pytest.mark.parametrize("norms", [3, [1, 2], {"median": 1.0}, {"least": 1.0, "median": "large", "largest": 2.0}])
def test_norms_that_are_no_figures_are_refused(norms: Any, tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    file = store.path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["checkpoints"][0]["measured"]["norms"] = norms
    manifest.pop("sha256")
    file.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(StoreError, match=r"checkpoints\[0\]\.measured\.norms.* (must be|is missing)"):
        inspect_store(Store(store.path))


def test_a_check_does_not_measure_curvature_for_engines_it_only_tries() -> None:
    """A step of each engine on 32 examples takes twenty evaluations in all, measuring curvature as many each time."""
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[1]))
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    found = check(Task(classifier(), loss), columns(40), Sources.by_label(columns(40)[1]), Plan(steps=2, lr=0.1))
    assert found.ok
    assert calls.count(32) < 30


# Ground truth.


def ask(out: Path) -> Truth:
    def train(subset: Tensor, seed: int) -> nn.Module:
        model = classifier()
        with torch.no_grad():
            model.get_parameter("0.bias")[:] += subset.float().mean() + seed % 7
        return model

    subsets = Subsets.without_each(Sources.by_label(columns()[1]))
    return retrain(train, Task.classifier(classifier()), columns(), subsets, out=out, progress=False)


def test_a_truth_in_a_place_that_cannot_be_written_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"could not make the folder .* Give a folder that you may write to"):
        ask(tmp_path / "file" / "truth")
    with pytest.raises(StoreError, match="could not make the folder"):
        ask(Path("/proc/truth"))


@pytest.mark.parametrize(
    "change",
    [
        *({"runs": value} for value in ("two", -1, None, 10**18)),
        {"subsets": 10**15},
        {"queries": []},
        {"kind": "thirds"},
        {"n": {"a": 1}},
        {"measure": 5},
        {"fingerprints": "none"},
        {"fingerprints": {"parameters": {"0.weight": 1}}},
        {"probes": {"losses": [], "measures": "none"}},
        {"noise": "little"},
        {"at_once": 0},
        {"model": 7},
    ],
    ids=str,
)
def test_a_forged_truth_is_read_as_it_is_or_refused_in_a_line(change: dict[str, Any], tmp_path: Path) -> None:
    ask(tmp_path / "truth")
    file = tmp_path / "truth" / "truth.json"
    about = json.loads(file.read_text())
    about.pop("sha256")
    file.write_text(json.dumps(sealed({**about, **change})))
    uses: list[Callable[[Path], Truth]] = [Truth.load, ask]
    for use in uses:
        if change == {"runs": 10**18}:  # as of a truth of which more was asked for than is there
            use(tmp_path / "truth")
            continue
        with pytest.raises(ImprintError) as caught:
            use(tmp_path / "truth")
        assert "\n" not in str(caught.value)
