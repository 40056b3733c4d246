"""Stores with factored imprints: they say what dense ones say, by every readout, for every kind of model."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from typer.testing import CliRunner

from imprint import Plan, Sources, Store, Task, TaskError, attribute, check, self_influence, simulate
from imprint.cli.app import app
from imprint.cli.inspection import inspect_store
from imprint.readout.kernels import ReadoutName, query_gradients
from imprint.readout.reader import Reader
from imprint.tensors.vectors import Flat
from tests.problems import known
from tests.tensors.test_rows import CASES, Make, mlp
from tests.zoo import EXAMPLES, ZOO

N = 9
PLAN = Plan(engine="spectral", steps=30, damping=0.05, directions=7)
DENSE = replace(PLAN, form="dense")
PROJECTED = replace(PLAN, form="projected")
CPU = torch.device("cpu")
READOUTS: tuple[ReadoutName, ...] = ("jvp", "gradient", "central")


def columns(shape: tuple[int, ...] = (4,)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (N,), generator=generator)


def task(make: Make = mlp, **options: Any) -> Task:
    torch.manual_seed(0)
    return Task.classifier(make().double(), **{"measure": "margin", **options})


def store(task: Task, plan: Plan = PLAN, data: Any = None, **options: Any) -> Store:
    given = {"sources": Sources.per_example(N), "progress": False, **options}
    return simulate(task, columns() if data is None else data, plan=plan, **given)


def scores(task: Task, store: Store, queries: Any = None, **options: Any) -> Tensor:
    found: Tensor = attribute(task, store, queries or columns(), progress=False, **options).scores
    return found


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize(("make", "shape", "selected", "layers"), CASES.values(), ids=CASES.keys())
def test_factored_and_dense_stores_give_the_same_scores(
    make: Make, shape: tuple[int, ...], selected: Any, layers: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    one, data = task(make, parameters=selected), columns(shape)
    factored, dense = store(one, PLAN, data), store(one, DENSE, data)
    assert factored.checkpoints[0].choices.layers == layers and dense.checkpoints[0].choices.layers == ()
    expected = scores(one, dense, data)
    for readout in READOUTS:
        close(scores(one, factored, data, readout=readout), expected, 1e-6 if readout == "central" else 1e-9)
    close(self_influence(one, factored, data, progress=False), expected.diagonal())
    assert not caplog.records
    factored.verify()


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.forward_mode])
def test_every_member_of_the_zoo_is_scored_alike_from_both_forms(name: str) -> None:
    """Texts in dictionaries with a collate function, batch norm, attention, tied weights, models without vmap."""
    member = ZOO[name].make(torch.device("cpu"), torch.float64)
    found = []
    forms: tuple[Any, ...] = ("factored", "dense")
    for form in forms:
        curvature: Any = "auto" if member.task.outputs is not None else "hessian"
        plan = Plan(engine="spectral", steps=5, damping=0.5, directions=6, curvature=curvature, form=form)
        made = simulate(
            member.task, member.data, Sources.per_example(EXAMPLES), plan, collate_fn=member.collate_fn, progress=False
        )
        for readout in READOUTS[:2]:
            result = attribute(
                member.task,
                made,
                member.queries,
                readout=readout,
                collate_fn=member.collate_fn,
                progress=False,
            )
            found.append(result.scores)
    for other in found[1:]:
        close(other, found[0], 1e-8)


def twice(model: nn.Module, batch: Any) -> Tensor:
    """A measurement that calls the model on two inputs."""
    both: Tensor = model(batch[0]) - model(2 * batch[0]).tanh()
    return both[:, 0]


def with_the_weight(model: nn.Module, batch: Any) -> Tensor:
    """A measurement that uses a layer's weight in a way of its own, beside the layer."""
    own = model[0].weight.square().sum() * batch[0][:, 0]  # type: ignore[index]
    return model(batch[0])[:, 0] + own  # type: ignore[no-any-return]


@pytest.mark.parametrize("measure", [twice, with_the_weight])
@pytest.mark.parametrize("readout", ["jvp", "gradient"])
def test_a_measurement_that_uses_layers_in_its_own_way_is_read_right(
    measure: Callable[[nn.Module, Any], Tensor], readout: ReadoutName, caplog: pytest.LogCaptureFixture
) -> None:
    one = task(measure=measure)
    factored, dense = store(one), store(one, DENSE)
    close(scores(one, factored, readout=readout), scores(one, dense, readout=readout))
    if (measure, readout) != (twice, "jvp"):  # adapters serve a layer as often as it is called
        assert "factored imprints are multiplied out to be read: " in caplog.text


@pytest.mark.parametrize("sources", [Sources.per_example(N), Sources.by_label([0, 1, 2] * 3)], ids=["each", "groups"])
def test_a_projected_store_reads_what_full_imprints_have_on_the_basis(sources: Sources) -> None:
    one = task()
    made, dense = store(one, PROJECTED, sources=sources), store(one, DENSE, sources=sources)
    functional, theta = one.at(made.base(0, CPU))
    flat = Flat(theta)
    basis, full = flat.vectors(made.basis(0, CPU)), flat.vectors(dense.imprints(0, 0, len(dense), CPU))
    inside = full @ basis.T
    torch.testing.assert_close(flat.vectors(made.imprints(0, 0, len(made), CPU)), inside @ basis)
    slopes = flat.vectors(query_gradients(functional, theta, columns(), N, vectorise=True))
    expected = (slopes @ basis.T) @ inside.T
    for readout in READOUTS:
        close(scores(one, made, readout=readout), expected, 1e-6 if readout == "central" else 1e-9)
    lost = 1 - float(inside.square().sum() / full.square().sum())
    assert 0.01 < lost < 0.99
    assert made.checkpoints[0].measured.lost == pytest.approx(lost, rel=1e-3)
    made.verify()


def test_what_a_projection_loses_is_said_and_with_every_direction_it_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = task()
    few = store(one, PROJECTED, out=tmp_path / "few")
    assert f"on 7 directions imprints lose {few.checkpoints[0].measured.lost:.2g} of their" in caplog.text
    shown = CliRunner().invoke(app, ["inspect", str(few.path)], env={"COLUMNS": "200"}).output
    assert "projected to 7 directions" in shown and "lost" in shown
    every = sum(p.numel() for p in one.model.parameters())
    whole = replace(PROJECTED, directions=every), replace(DENSE, directions=every)
    projected, dense = (store(one, plan) for plan in whole)
    assert known(projected.checkpoints[0].measured.lost) < 1e-6
    assert "on 43 directions" not in caplog.text
    close(scores(one, projected), scores(one, dense), 1e-6)
    assert inspect_store(few)["bytes_per_source"] < inspect_store(dense)["bytes_per_source"]


def test_sources_of_several_examples_are_kept_in_full() -> None:
    groups = Sources.groups({"a": [0, 1, 2], "b": [3]})
    assert store(task(), sources=groups).checkpoints[0].basis is None


def test_a_subset_of_the_examples_is_kept_in_factors() -> None:
    some = Sources.groups({"seventh": [7], "first": [0]})
    found = store(task(), sources=some)
    assert found.checkpoints[0].choices.layers == ("0", "2")
    close(scores(task(), found), scores(task(), store(task()))[:, [7, 0]])


def test_bfloat16_keeps_two_digits_and_a_fourth_of_the_size() -> None:
    half, whole = store(task(), dtype=torch.bfloat16), store(task())
    close(scores(task(), half), scores(task(), whole), 0.02)
    files = [s.path / s.checkpoints[0].imprints[0].path for s in (half, whole)]
    assert files[0].stat().st_size < files[1].stat().st_size
    half.verify()


def sharp() -> tuple[Task, tuple[Tensor, Tensor]]:
    """A trained model, at which gradients lie along sharp directions for the most part, and its data."""
    torch.manual_seed(0)
    x = torch.randn(60, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    y[::10] = (y[::10] + 1) % 3
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return Task.classifier(model, measure="margin"), (x, y)


@pytest.mark.parametrize("form", ["factored", "projected"])
def test_parts_that_cancel_are_rounded_together(form: Any) -> None:
    one, data = sharp()
    plan = Plan(engine="spectral", steps="infinite", damping=1e-4, directions=80, form=form)
    half, whole = (
        simulate(one, data, Sources.per_example(60), plan, dtype=dtype, progress=False)
        for dtype in (torch.bfloat16, None)
    )
    close(scores(one, half, data), scores(one, whole, data), 0.05)
    with safe_open(half.path / half.checkpoints[0].imprints[0].path, framework="pt") as tensors:
        kept = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert kept.pop("coefficients") == ("F32" if form == "factored" else "BF16")
    assert set(kept.values()) <= {"BF16"}


def test_parameters_of_two_dtypes_are_refused_in_words() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.float()).tanh().double())  # type: ignore[no-any-return]

    mixed = Task.classifier(Mixed())
    words = r"parameter 'first.weight' is torch.float32 and 'last.weight' is torch.float64: the spectral engine takes"
    with pytest.raises(TaskError, match=words):
        store(mixed)
    assert re.match(words, check(mixed, columns(), Sources.per_example(N), PLAN).problems[0])
    store(Task.classifier(Mixed(), parameters="last.*"))


def test_float32_agrees_with_float64_to_rounding() -> None:
    torch.manual_seed(0)
    single = Task.classifier(mlp(), measure="margin")
    x, y = columns()
    found = simulate(single, (x.float(), y), Sources.per_example(N), PLAN, progress=False)
    double = Task.classifier(mlp().double(), measure="margin")
    double.model.load_state_dict(single.model.state_dict())
    close(scores(single, found, (x.float(), y)), scores(double, store(double)), 1e-3)


@pytest.mark.parametrize("form", ["factored", "dense"])
def test_batches_and_memory_do_not_change_the_imprints(form: str) -> None:
    plan = PLAN if form == "factored" else DENSE
    expected = scores(task(), store(task(), plan))
    for options in ({"batch_size": 2}, {"batch_size": 4, "memory": "1kB"}, {"memory": "50MB"}):
        found = store(task(), plan, **options)
        close(scores(task(), found), expected, 1e-9)
        close(scores(task(), found, memory="1kB", batch_size=2), expected, 1e-9)


@pytest.mark.parametrize("plan", [PLAN, DENSE, PROJECTED], ids=["factored", "dense", "projected"])
def test_a_file_has_more_sources_than_little_memory_holds_at_once(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    data, each = (torch.randn(600, 4).double(), torch.randint(0, 3, (600,))), Sources.per_example(600)
    little, some, much = (store(task(), plan, data, sources=each, memory=memory) for memory in ("50kB", "400kB", "1GB"))
    few = little.checkpoints[0].choices
    assert few.rows_at_once < few.rows_per_file < 100  # a file is put together in memory, too
    assert some.checkpoints[0].choices.rows_at_once < 256
    assert [file.rows for file in some.checkpoints[0].imprints] == [(0, 256), (256, 512), (512, 600)]
    assert len(much.checkpoints[0].imprints) == 1
    for name, tensor in much.imprints(0, 0, 600, CPU).items():
        torch.testing.assert_close(little.imprints(0, 0, 600, CPU)[name], tensor, rtol=1e-9, atol=1e-10)
    assert "the basis of 7" not in caplog.text


def test_a_basis_that_does_not_fit_the_memory_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    states = [{name: scale * tensor for name, tensor in task().state().items()} for scale in (0.5, 1.0)]
    found = store(task(), PLAN, memory="1kB", checkpoints=states)
    told = [record.getMessage() for record in caplog.records if "the basis" in record.getMessage()]
    assert told == ["the basis of 7 directions takes 2408 bytes, more than the memory budget: few sources fit at once"]
    close(scores(task(), found), scores(task(), store(task(), PLAN, checkpoints=states)))


def test_checkpoints_are_averaged_and_one_of_weight_0_is_left_out() -> None:
    one = task()
    states = [{name: scale * tensor for name, tensor in one.state().items()} for scale in (0.5, 3.0, 1.0)]
    plan = Plan(engine="spectral", steps=("infinite", 1, 30), damping=0.05, directions=7, weight=(1.0, 0.0, 3.0))
    found = store(one, plan, checkpoints=states)
    assert found.checkpoints[1].base is None and found.checkpoints[1].decided is None
    first = store(one, Plan(engine="spectral", steps="infinite", damping=0.05, directions=7), checkpoints=states[:1])
    close(scores(one, found), 0.25 * scores(one, first) + 0.75 * scores(one, store(one)))


def test_a_batch_that_was_changed_in_place_is_read_anew() -> None:
    one = task()
    reader = Reader(one, store(one))
    x, y = columns()
    batch = (x.clone(), y)
    before = reader.scores(batch)
    batch[0].mul_(2.0)
    close(reader.scores(batch), scores(one, store(one), (2 * x, y)))
    assert not torch.allclose(before, reader.scores(batch))


class Branching(nn.Module):
    """Its middle layer is used for batches in which anything is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(self.middle(h) if float(x.detach().abs().max()) < 50 else h)  # type: ignore[no-any-return]


def test_a_layer_that_some_batches_do_not_use_is_told_with_advice() -> None:
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 3, (40,))
    x[37] *= 1000  # none of the examples that are tried alone beforehand
    each = Sources.per_example(40)
    with pytest.raises(TaskError, match=r"linear layer 'middle' is not used once for each example.*form=\"dense\""):
        store(task(Branching), data=(x, y), batch_size=4, sources=each)
    store(task(Branching), DENSE, (x, y), batch_size=4, sources=each)


def test_a_store_shows_what_its_imprints_are_made_of(tmp_path: Path) -> None:
    plan = Plan(engine="spectral", steps="infinite", damping=0.1, directions=3)
    found = store(task(), plan, out=tmp_path / "store")
    values = inspect_store(found)
    assert values["checkpoints"][0]["decided"]["layers"] == ("0", "2")
    shown = CliRunner().invoke(app, ["inspect", str(found.path)], env={"COLUMNS": "200"}).output
    for text in ("factored (0, 2)", "infinite", "directions", "curvature outside", "share outside"):
        assert text in shown


@pytest.mark.parametrize("plan", [PLAN, DENSE, PROJECTED], ids=["factored", "dense", "projected"])
def test_a_check_foretells_a_spectral_run(plan: Plan) -> None:
    one = task()
    found = check(one, columns(), Sources.per_example(N), plan)
    assert found.ok and found.estimate is not None, found.problems
    made = store(one, plan)
    assert found.estimate.bytes_per_source <= inspect_store(made)["bytes_per_source"]
    assert found.estimate.rows_at_once == made.checkpoints[0].choices.rows_per_file
    assert found.estimate.seconds < 60 and (found.estimate.peak_bytes or 1) > 0


def test_a_check_finds_a_step_that_is_too_long() -> None:
    plan = Plan(engine="spectral", steps=3, lr=1e3)
    assert "steps of lr=1e+03 are too long" in check(task(), columns(), Sources.per_example(N), plan).problems[0]
