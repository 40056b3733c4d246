"""`check` says beforehand what `simulate` and `attribute` then do, what the store takes, and changes nothing."""

import gc
import logging
import math
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from imprint import (
    Check,
    DataError,
    ImprintError,
    Plan,
    Sources,
    SourcesError,
    Store,
    Task,
    attribute,
    check,
    simulate,
)
from imprint.errors import TaskError
from imprint.readout.kernels import ReadoutName
from imprint.simulation import estimate
from tests.zoo import ZOO, Member


@pytest.fixture(autouse=True)
def _a_quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nobody wants to know how fast the disk really is."""
    monkeypatch.setattr(estimate, "_WRITTEN", 1 << 12)


PLANS: dict[str, Plan] = {
    "tangent": Plan(steps=2, lr=0.1),
    "spectral": Plan(engine="spectral", steps=2, directions=3),
    "trajectories": Plan(engine="trajectories", steps=2, lr=0.1, keep_pair=True),
}


def checked(member: Member, plan: Plan | None = None, **options: Any) -> Check:
    given = {"queries": member.queries, "collate_fn": member.collate_fn, **options}
    return check(member.task, member.data, member.sources, plan, **given)


def simulated(member: Member, plan: Plan, **options: Any) -> Store:
    given = {"collate_fn": member.collate_fn, "progress": False, **options}
    return simulate(member.task, member.data, member.sources, plan, **given)


def classifier(n: int = 12, features: int = 4, sources: Sources | None = None, **options: Any) -> Member:
    """A linear classifier with as many examples and parameters as are wanted."""
    data = torch.randn(n, features), torch.randint(0, 3, (n,))
    task = Task.classifier(nn.Linear(features, 3), **options)
    return Member(task, data, sources or Sources.by_label([i % 3 for i in range(n)]), (data[0][:2], data[1][:2]))


@pytest.mark.parametrize("name", ZOO)
def test_check_says_what_simulate_and_attribute_do(name: str) -> None:
    member = ZOO[name].make(torch.device("cpu"), torch.float32)
    for engine, plan in PLANS.items():
        if engine == "spectral" and member.task.outputs is None:
            (possibility,) = (each for each in checked(member).engines if each.name == engine)
            assert not possibility.works and possibility.remark == str(_outcome(member, plan))
            continue
        found, store = checked(member, plan), _outcome(member, plan)
        (possibility,) = (each for each in found.engines if each.name == engine)
        assert possibility.works == found.ok == isinstance(store, Store)
        if isinstance(store, ImprintError):
            assert found.problems == (possibility.remark,) == (str(store),)
            assert found.estimate is None
            continue
        alone = store.checkpoints[0].measured.one_by_one
        assert possibility.remark == _remark(alone)
        assert found.estimate is not None and found.estimate.one_by_one == alone
        assert found.estimate.bytes_per_source * len(store) == _row_bytes(store)

    assert isinstance(store, Store)  # of trajectories, from which everything can be read out
    assert tuple(readout.name for readout in found.readouts) == get_args(ReadoutName)
    for readout in found.readouts:
        options: Any = {"readout": readout.name, "collate_fn": member.collate_fn, "progress": False}
        details = attribute(member.task, store, member.queries, **options).details
        assert readout.works == ("fallback" not in details)
        assert readout.remark.startswith(details.get("fallback") or _remark(details.get("one_by_one")))


def _remark(alone: str | None) -> str:
    return f"sources one by one, {alone}" if alone else "many sources at once"


def _outcome(member: Member, plan: Plan) -> Store | ImprintError:
    try:
        return simulated(member, plan)
    except ImprintError as error:
        return error


# --- what it takes

SIZES: dict[str, Callable[[], tuple[Member, Plan, dict[str, Any]]]] = {
    "many sources": lambda: (classifier(1000, 9, Sources.per_example(1000)), Plan(steps=1, lr=0.001), {}),
    "many parameters": lambda: (classifier(12, 9000), Plan(steps=1, lr=0.001), {}),
    "half precision": lambda: (classifier(12, 9000), Plan(steps=1, lr=0.001), {"dtype": torch.bfloat16}),
    "a pair": lambda: (classifier(12, 9000), replace(PLANS["trajectories"], lr=0.001), {}),
    "large examples": lambda: (classifier(12, 9000, parameters="bias"), Plan(steps=1, lr=0.001), {}),
    "factored": lambda: (classifier(12, 9000, Sources.per_example(12)), PLANS["spectral"], {}),
    "factored, half precision": lambda: (
        classifier(12, 9000, Sources.per_example(12)),
        PLANS["spectral"],
        {"dtype": torch.bfloat16},
    ),
    "many factored sources": lambda: (classifier(1000, 9, Sources.per_example(1000)), PLANS["spectral"], {}),
    "spectral in groups": lambda: (classifier(12, 9000), PLANS["spectral"], {}),
    "two of three checkpoints": lambda: (classifier(12, 9000), Plan(steps=1, lr=0.001, weight=(1.0, 0.0, 2.0)), {}),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_size_of_the_store_is_known_beforehand(case: str) -> None:
    member, plan, options = SIZES[case]()
    if isinstance(plan.weight, tuple):
        options = {**options, "checkpoints": [member.task.state() for _ in plan.weight]}
    expected = checked(member, plan, **options).estimate
    store = simulated(member, plan, **options)
    assert expected is not None
    assert abs(expected.store_bytes - store.bytes) <= 0.05 * store.bytes
    assert expected.bytes_per_source * len(store) == _row_bytes(store)


def _row_bytes(store: Store) -> int:
    """What the rows of all sources take, without the heads of their files."""
    total = 0
    for checkpoint in store.checkpoints:
        for file in (*checkpoint.imprints, *checkpoint.midpoints):
            with safe_open(store.path / file.path, framework="pt") as tensors:
                total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize(
    "plan",
    [
        Plan(steps=3),
        Plan(steps=3, lr=0.1, batch_size=5, source_sample=2),
        Plan(engine="trajectories", steps=3, epsilon="auto"),
        Plan(engine="trajectories", variant="one_sided", steps=1, lr=0.1),
        Plan(steps=(2, 3), lr=("auto", 0.1), weight=(1.0, 0.0)),
    ],
)
def test_every_estimate_is_a_positive_number(plan: Plan) -> None:
    member = classifier()
    states = [member.task.state()] * (2 if isinstance(plan.steps, tuple) else 1)
    found = checked(member, plan, checkpoints=states, memory="20kB")
    expected = found.estimate
    assert found.ok and expected is not None
    assert 0 < expected.seconds < math.inf
    assert expected.peak_bytes is None or expected.peak_bytes > 0
    assert 1 <= expected.rows_at_once <= len(member.sources)


def test_memory_decides_how_many_sources_are_simulated_at_once() -> None:
    member = classifier(sources=Sources.per_example(12))
    rows = []
    for budget in ("1GB", "20kB", "1kB"):
        expected = checked(member, PLANS["tangent"], memory=budget).estimate
        store = simulated(member, PLANS["tangent"], memory=budget)
        assert expected is not None and expected.rows_at_once == store.checkpoints[0].choices.rows_at_once
        rows.append(expected.rows_at_once)
    assert rows[0] == 12 and 12 > rows[1] > rows[2] == 1


def test_what_is_checked_is_counted() -> None:
    member = classifier(parameters="bias")
    found = checked(member, Plan(steps=2, lr=0.1, weight=(1.0, 0.0)), checkpoints=[member.task.state()] * 2)
    assert found.parameters == {"bias": (3,)}
    assert (found.values, found.values_in_all) == (3, 15)
    assert (found.examples, found.sources, found.checkpoints) == (12, 3, 1)
    assert found.to_json()["ok"] and found.to_json()["plan"] == found.plan.to_json()


# --- what stands in the way


def refused(member: Member, plan: Plan | None = None, **options: Any) -> str:
    """The one problem that is found, which a simulation stops at as well."""
    found = checked(member, plan or PLANS["tangent"], **options)
    assert not found.ok and not found.to_json()["ok"]
    (problem,) = found.problems
    return problem


def test_a_loss_that_is_nan_is_found_wherever_it_is() -> None:
    member = classifier(60)
    member.data[0][47] = torch.nan  # beyond the few examples on which engines are tried
    problem = refused(member)
    assert "the loss of training example 47 (source '2') is nan" in problem
    with pytest.raises(ImprintError) as failed:
        simulated(member, PLANS["tangent"])
    assert str(failed.value) == problem


def test_mirrored_trajectories_off_the_optimum_are_refused() -> None:
    plan = Plan(engine="trajectories", variant="mirrored", steps=2, lr=0.1)
    assert "mirrored trajectories are valid only at an optimum" in refused(classifier(), plan)


@pytest.mark.curvature
def test_a_step_that_runs_away_comes_with_advice() -> None:
    task = Task.regression(nn.Linear(4, 1))
    member = classifier()._replace(task=task, data=(torch.randn(12, 4), torch.randn(12)), queries=None)
    problem = refused(member, Plan(steps=4, lr=1e6))
    assert "runs away" in problem
    assert "The step is lr=1e+06" in problem and 'lr="auto" chooses one' in problem


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
@pytest.mark.curvature
def test_a_step_that_a_simulation_warns_of_is_warned_of_before(engine: str) -> None:
    member, plan = classifier(), Plan(engine=engine, steps=2, lr=10.0, batch_size=5, momentum=0.3)
    found = checked(member, plan)
    with pytest.warns(UserWarning, match=r"a step multiplies some direction by .* would be safe") as caught:
        simulated(member, plan)
    assert found.ok and found.warnings == (str(caught[0].message),)
    assert str(found).startswith(f"{found.tried}\nwarning: {caught[0].message}\n")
    for lr in (0.1, "auto"):
        calm = checked(member, replace(plan, lr=lr))
        assert calm.warnings == () and "warning" not in str(calm)


def test_a_disk_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def usage(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(free=100)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    problem = refused(classifier(), out=tmp_path / "not" / "yet" / "there")
    assert re.match(r"the simulation needs [\d,]+ bytes of disk, and .* has 100 free: select fewer", problem)
    assert asked == [tmp_path]  # the disk on which the folder will be


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_the_disk_must_hold_the_store_and_a_snapshot(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member = classifier(12, 9000, Sources.per_example(12))
    expected = checked(member, replace(PLANS[engine], lr=0.001)).estimate
    assert expected is not None
    path = {"tangent": 1, "trajectories": 2}[engine] * expected.rows_at_once + 1  # every row, and the base
    assert expected.disk_bytes == expected.store_bytes + path * 4 * 27_003
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=expected.store_bytes + 1))
    assert "bytes of disk" in refused(member, replace(PLANS[engine], lr=0.001))


def test_a_folder_that_cannot_be_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("mine")
    for out in (tmp_path / "taken", tmp_path / "taken" / "within" / "it"):
        assert refused(classifier(), out=out) == f"{tmp_path / 'taken'} is a file: give a folder for the store."
        with pytest.raises(ImprintError):
            simulated(classifier(), PLANS["tangent"], out=out)

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", denied)
    assert refused(classifier(), out=tmp_path / "store") == f"{tmp_path} cannot be written to: Permission denied"


def test_a_bad_checkpoint_is_found_before_its_turn_comes() -> None:
    member = classifier()
    good = member.task.state()
    bad = {**good, "bias": torch.full((3,), torch.nan)}
    assert "'bias' of checkpoint 1 holds NaN" in refused(member, checkpoints=[good, bad])
    skipped = Plan(steps=2, lr=0.1, weight=(1.0, 0.0))
    assert checked(member, skipped, checkpoints=[good, bad]).ok


class _Integers(torch.autograd.Function):
    """Has no derivative of any kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError("nobody knows")


def test_a_model_that_no_engine_takes_is_told_as_such() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _Integers.apply(model(batch[0])).sum(1)  # type: ignore[no-any-return, no-untyped-call]

    member = classifier()._replace(task=Task(nn.Linear(4, 3), loss))
    found = checked(member, PLANS["tangent"])
    assert not any(engine.works for engine in found.engines)
    *others, spectral = found.engines
    assert all("cannot differentiate this model" in engine.remark for engine in others)
    assert spectral.name == "spectral" and "needs to see the model's outputs" in spectral.remark
    assert found.readouts == () and found.estimate is None
    assert found.problems == (found.engines[0].remark,)


def test_a_loss_that_is_never_the_same_is_refused() -> None:
    noise = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        values: Tensor = model(batch[0])[:, 0]
        return values + torch.rand(1, generator=noise)

    member = classifier()._replace(task=Task(nn.Linear(4, 3), loss))
    with pytest.raises(TaskError, match=r"on the second.*draws random numbers"):
        checked(member, PLANS["trajectories"])


def test_queries_that_cannot_be_measured_are_found() -> None:
    member = classifier()
    problem = refused(member, queries=(torch.randn(2, 5), torch.tensor([0, 1])))
    assert problem.startswith("no readout works: the measurement failed on the first queries")
    assert checked(member, PLANS["tangent"], queries=None).ok  # by default a few training examples


def test_what_does_not_fit_together_raises_as_it_does_in_a_simulation() -> None:
    member = classifier()
    with pytest.raises(SourcesError, match="made for 12 training examples, the data has 6"):
        checked(member._replace(data=(member.data[0][:6], member.data[1][:6])))
    with pytest.raises(DataError, match="there are no queries"):
        checked(member, queries=[])


# --- what it leaves


def test_nothing_is_written_and_nothing_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    member = classifier()
    member.task.model.train()
    before = {name: tensor.clone() for name, tensor in member.task.state().items()}
    assert checked(member, PLANS["tangent"], out=tmp_path / "out" / "store").ok
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir()) and not list((tmp_path / "out").iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in member.task.state().items())
    assert member.task.model.training
    assert all(parameter.grad is None for parameter in member.task.model.parameters())


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
def test_nothing_is_logged_and_the_level_is_put_back(level: int, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("imprint")
    log.setLevel(level)
    try:
        member = ZOO["custom_function"].make(torch.device("cpu"), torch.float32)
        assert checked(member, PLANS["trajectories"]).ok
        assert log.level == level and not caplog.records
        with pytest.raises(DataError):
            checked(member, queries=[])
        assert log.level == level
    finally:
        log.setLevel(logging.NOTSET)


def test_half_precision_is_warned_of_once() -> None:
    member = classifier()
    half = member._replace(
        task=Task.classifier(nn.Linear(4, 3).bfloat16()), data=(member.data[0].bfloat16(), member.data[1])
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checked(half, PLANS["tangent"], queries=None)
    assert [str(each.message)[:36] for each in told] == ["the selected parameters are torch.bf"]


def test_it_works_inside_inference_mode() -> None:
    member = classifier()
    with torch.inference_mode():
        assert checked(member, PLANS["tangent"]).ok


def test_threads_that_check_at_once_leave_everything_as_it_was() -> None:
    log, members = logging.getLogger("imprint"), [classifier() for _ in range(3)]
    level, filters = log.level, list(warnings.filters)
    found: list[bool] = []

    def one(member: Member) -> None:
        found.append(checked(member, PLANS["tangent"]).ok)

    threads = [threading.Thread(target=one, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3
    assert log.level == level and warnings.filters == filters


def test_a_lack_of_memory_is_a_problem_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr("imprint.checking.estimate", out_of_memory)
    problem = refused(classifier())
    assert re.fullmatch(
        r"memory runs out \(.*CUDA out of memory.*\): lower memory= or batch_size=, or select .*", problem
    )


def test_an_engine_that_runs_out_of_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate_some(*arguments: Any, **options: Any) -> Store:
        if arguments[3].engine == "trajectories":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return simulate(*arguments, **options)

    monkeypatch.setattr("imprint.checking.simulate", simulate_some)
    tangent, trajectories, _ = checked(classifier(), PLANS["tangent"]).engines
    assert tangent.works and not trajectories.works and trajectories.remark.startswith("memory runs out")


def test_only_a_few_queries_are_read() -> None:
    member, read = classifier(), []

    class Long(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return member.data[0][index % 12], member.data[1][index % 12]

    assert checked(member, PLANS["tangent"], queries=Long()).ok
    assert 0 < len(read) <= 16 and max(read) < 16

    def endless() -> Iterator[Any]:
        while True:
            read.append(-1)
            yield member.data

    read.clear()
    assert checked(member, PLANS["tangent"], queries=endless()).ok
    assert len(read) == 1


def test_a_check_can_be_read() -> None:
    text = str(checked(classifier(), PLANS["tangent"]))
    tried, _, rest = text.partition("\n")
    assert "one step of the tangent engine ran on 12 examples and was read out by jvp, central" in tried
    assert "will work" not in text
    assert rest.startswith("15 of 15 values of the parameters, 3 sources of 60 bytes each\nabout 0:0")
    assert "\nengine trajectories: works, many sources at once\n" in text
    member = classifier()
    member.data[0][3] = torch.nan
    text = str(checked(member, PLANS["tangent"]))
    assert text.startswith("problem: the loss of training example 3 is nan: look for NaN")
