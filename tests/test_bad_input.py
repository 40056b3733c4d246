"""Whatever is given wrongly is refused with an error that names it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import (
    DataError,
    ImprintError,
    Plan,
    PlanError,
    Reader,
    ReadoutError,
    SimulationError,
    Sources,
    SourcesError,
    Store,
    StoreError,
    Task,
    TaskError,
    attribute,
    self_influence,
    simulate,
)

N = 12
PLAN = Plan(steps=2, lr=0.1)
SOURCES = Sources.by_label(["ann", "bob", "cid"] * 4)


def _columns(rows: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randint(2, (rows,), generator=generator)


def _model(features: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 2))


def _simulate(task: Task | None = None, data: Any = None, sources: Sources = SOURCES, **options: Any) -> Store:
    options = {"plan": PLAN, "progress": False, **options}
    return simulate(task or Task.classifier(_model()), _columns() if data is None else data, sources, **options)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.classifier(_model())


@pytest.fixture(scope="module")
def store(task: Task) -> Store:
    return _simulate(task)


def _mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _each_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# --- the task


def test_a_scalar_loss_is_told_about_reduction() -> None:
    with pytest.raises(TaskError, match=r'loss must return one value per example, shape \(12,\).*reduction="none"'):
        _simulate(Task(_model(), _mean_loss))


def test_a_loss_of_the_wrong_shape_is_shown_its_shape() -> None:
    with pytest.raises(TaskError, match=r"one value per example.*shape \(12, 2\)"):
        _simulate(Task(_model(), lambda model, batch: model(batch[0])))


def test_a_loss_that_is_no_tensor_is_told_so() -> None:
    with pytest.raises(TaskError, match=r"one value per example.*a float"):
        _simulate(Task(_model(), lambda model, batch: 0.0))  # type: ignore[arg-type, return-value]


def test_a_loss_that_fails_shows_its_own_error() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(TaskError, match=r"loss function failed on a few examples.*no such column"):
        _simulate(Task(_model(), loss))


def test_a_scalar_measure_is_refused(store: Store) -> None:
    with pytest.raises(TaskError, match=r"measure must return one value per query, shape \(3,\)"):
        attribute(Task(_model(), _each_loss, measure=_mean_loss), store, _columns(3), progress=False)


def test_a_measure_that_fails_shows_its_own_error(store: Store) -> None:
    def measure(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(ReadoutError, match=r"measurement failed.*no such column"):
        attribute(Task(_model(), _each_loss, measure=measure), store, _columns(3), progress=False)


def test_a_regulariser_must_be_a_scalar() -> None:
    with pytest.raises(TaskError, match=r"regulariser must return a scalar, got shape \(4,\)"):
        _simulate(Task.classifier(_model(), regulariser=lambda model: model[0].bias.square()))


def test_a_regulariser_that_fails_shows_its_own_error() -> None:
    def regulariser(model: nn.Module) -> Tensor:
        raise KeyError("no such layer")

    with pytest.raises(TaskError, match=r"regulariser.*no such layer"):
        _simulate(Task.classifier(_model(), regulariser=regulariser))


def test_a_glob_that_matches_nothing_is_shown_the_parameters() -> None:
    with pytest.raises(TaskError, match=r"'head\.\*' matches no trainable parameter.*0\.weight"):
        Task.classifier(_model(), parameters=["0.*", "head.*"])


def test_a_glob_of_frozen_parameters_matches_nothing() -> None:
    model = _model()
    model.get_submodule("0").requires_grad_(False)
    with pytest.raises(TaskError, match=r"'0\.\*' matches no trainable parameter"):
        Task.classifier(model, parameters="0.*")


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match=r"no trainable parameters.*requires_grad=False"):
        Task.classifier(_model().requires_grad_(False))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either loss=, or outputs= with output_loss="),
        ({"loss": _each_loss, "outputs": _each_loss, "output_loss": F.mse_loss}, "either loss=, or outputs="),
        ({"outputs": _each_loss}, "outputs= and output_loss= belong together"),
        ({"loss": _each_loss, "output_loss": F.mse_loss}, "outputs= and output_loss= belong together"),
    ],
)
def test_a_task_has_one_loss(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        Task(_model(), **given)


def test_an_unknown_measure_is_shown_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"'accuracy' is unknown.*margin, logprob, logit"):
        Task.classifier(_model(), measure="accuracy")


def test_a_measure_by_name_needs_outputs() -> None:
    with pytest.raises(TaskError, match=r"'margin' needs the model's outputs.*output_loss="):
        Task(_model(), _each_loss, measure="margin")


def test_a_measure_by_name_needs_targets() -> None:
    task = Task(
        _model(),
        outputs=lambda model, batch: model(batch["x"]),
        output_loss=lambda z, batch: z.sum(1),
        measure="margin",
    )
    store = _simulate(task, {"x": _columns()[0]})
    with pytest.raises(TaskError, match=r"needs the right class.*labels"):
        attribute(task, store, {"x": _columns(3)[0]}, progress=False)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_other_than_the_models_is_refused(device: str) -> None:
    with pytest.raises(TaskError, match=f"device='{device}' was asked for, but the model is on 'cpu'"):
        _simulate(device=device)


def test_a_model_on_the_meta_device_is_refused(store: Store) -> None:
    task = Task.classifier(_model().to("meta"))
    with pytest.raises(TaskError, match=r"meta device.*load its weights"):
        _simulate(task)
    with pytest.raises(TaskError, match=r"meta device.*load its weights"):
        attribute(task, store, _columns(3), progress=False)


def test_a_model_on_several_devices_is_refused() -> None:
    model = _model()
    model.get_submodule("2").to("meta")
    with pytest.raises(TaskError, match=r"several devices.*cpu.*meta"):
        _simulate(Task.classifier(model))


def test_a_model_that_no_derivative_takes_is_refused() -> None:
    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).exp()
            h += 1  # exp needs its own output for its derivative
            return h

    for plan in (PLAN, Plan(engine="trajectories", steps=2, lr=0.1)):
        with pytest.raises(TaskError, match=f"{plan.engine} engine cannot differentiate this model.*inplace"):
            _simulate(Task.classifier(Overwrites(3, 2)), plan=plan)


# --- the sources


def test_there_must_be_sources() -> None:
    with pytest.raises(SourcesError, match="no sources"):
        Sources.groups({})


def test_a_source_without_members_is_named() -> None:
    with pytest.raises(SourcesError, match="'bob' has no members"):
        Sources.groups({"ann": [0], "bob": []})


def test_a_mask_of_nothing_has_no_members() -> None:
    with pytest.raises(SourcesError, match="'bob' has no members"):
        Sources.groups({"bob": np.zeros(4, dtype=bool)})


@pytest.mark.parametrize("member", [N, -1])
def test_a_member_outside_the_data_is_named_with_its_source(member: int) -> None:
    with pytest.raises(SourcesError, match=f"'bob' has member {member}, but the training data has examples 0 to 11"):
        _simulate(sources=Sources.groups({"ann": [0, 1], "bob": [2, member]}))


def test_ids_that_are_equal_as_text_are_duplicates() -> None:
    with pytest.raises(SourcesError, match="'1' appears more than once"):
        Sources.groups({1: [0], "1": [1]})


def test_a_member_listed_twice_is_refused() -> None:
    with pytest.raises(SourcesError, match="'bob' lists an example more than once"):
        Sources.groups({"bob": [3, 1, 3]})


@pytest.mark.parametrize("members", [[0.5, 1.5], ["first"], [[0, 1], [2, 3]]])
def test_members_must_be_indices(members: list[Any]) -> None:
    with pytest.raises(SourcesError, match="members of source 'bob' must be"):
        Sources.groups({"bob": members})


def test_names_of_sources_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SourcesError, match="do not exist: zoe"):
        Sources.groups({"ann": [0]}, names={"zoe": "Zoe"})


def test_ids_names_and_members_must_be_equally_many() -> None:
    with pytest.raises(SourcesError, match="got 1 ids, 2 names, 1 member lists"):
        Sources(("a",), ("a", "b"), (np.array([0]),))


# --- the data


@pytest.mark.parametrize("plan", [PLAN, Plan(engine="trajectories", steps=2, lr=0.1)], ids=["tangent", "trajectories"])
@pytest.mark.parametrize("example", [3, 5], ids=["of the first source", "of the last source"])
def test_nan_in_the_data_names_the_example_and_its_source(example: int, plan: Plan) -> None:
    x, y = _columns()
    x[example, 1] = torch.nan
    owner = ["ann", "bob", "cid"][example % 3]
    with pytest.raises(SimulationError, match=f"training example {example} .*'{owner}'.* is nan"):
        _simulate(data=(x, y), plan=plan)


@pytest.mark.parametrize("plan", [PLAN, Plan(engine="trajectories", steps=2, lr=0.1)], ids=["tangent", "trajectories"])
def test_a_loss_that_is_infinite_at_one_example_names_it(plan: Plan) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        distance: Tensor = (batch[0][:, 0] - 7).abs()
        return _each_loss(model, batch) - distance.log()

    x, y = _columns()
    x[4, 0] = 7
    with pytest.raises(SimulationError, match=r"training example 4 .*'bob'.* is inf"):
        _simulate(Task(_model(), loss), (x, y), plan=plan)


@pytest.mark.parametrize("batch_size", [None, 2], ids=["full batch", "mini-batches"])
@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_a_gradient_that_is_not_finite_names_source_step_and_parameter(engine: Any, batch_size: int | None) -> None:
    """√(z²) has a finite value and no derivative at 0, where an example of zeros puts it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        z: Tensor = model(batch[0])
        return z.square().sum(1).sqrt()

    x, y = _columns()
    x[4] = 0
    plan = Plan(engine=engine, steps=2, lr=0.1, batch_size=batch_size)
    with pytest.raises(SimulationError, match=r"(?=.*source 'bob')(?=.*step 0)(?=.*parameter 'weight')"):
        _simulate(Task(nn.Linear(3, 2, bias=False), loss), (x, y), plan=plan)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_name_the_parameter(value: float) -> None:
    model = _model()
    with torch.no_grad():
        model.get_parameter("2.weight")[1, 2] = value
    with pytest.raises(SimulationError, match=r"'2\.weight' of the model holds NaN or infinity"):
        _simulate(Task.classifier(model))


def test_a_checkpoint_that_is_not_finite_is_named_with_its_parameter(task: Task) -> None:
    bad = task.state()
    bad["0.bias"][0] = torch.nan
    with pytest.raises(SimulationError, match=r"'0\.bias' of checkpoint 1"):
        _simulate(task, checkpoints=[task.state(), bad])


def test_columns_must_have_equally_many_rows() -> None:
    x, y = _columns()
    with pytest.raises(DataError, match=r"the same number of rows, got \[11, 12\]"):
        _simulate(data=(x, y[:11]))


@pytest.mark.parametrize("data", [None, 3, iter([1, 2])], ids=["none", "number", "iterator"])
def test_what_is_no_dataset_is_refused(data: Any, task: Task) -> None:
    with pytest.raises(DataError, match=r"expected a map-style dataset.*got"):
        simulate(task, data, SOURCES, PLAN, progress=False)


def test_a_mapping_of_lists_is_no_dataset(task: Task) -> None:
    with pytest.raises(DataError, match="tensors"):
        _simulate(task, {"x": [[0.0, 1.0, 2.0]] * N, "y": [0, 1] * 6})


@pytest.mark.parametrize("data", [[], (torch.zeros(0, 3), torch.zeros(0))], ids=["list", "columns"])
def test_training_data_must_not_be_empty(data: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        _simulate(data=data)


def test_samples_that_do_not_stack_ask_for_a_collate_function() -> None:
    ragged = [(torch.zeros(1 + i % 2), 0) for i in range(N)]
    with pytest.raises(DataError, match=r"could not be collated.*collate_fn"):
        _simulate(data=ragged)


def test_batch_size_must_be_positive(task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="batch_size must be at least 1, got 0"):
        _simulate(batch_size=0)
    with pytest.raises(DataError, match="batch_size must be at least 1, got -2"):
        attribute(task, store, _columns(3), batch_size=-2, progress=False)


# --- the plan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "magic"),
        ("steps", 0),
        ("steps", 1.5),
        ("steps", (3, 0)),
        ("steps", True),
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("lr", (0.1, "slow")),
        ("damping", -0.1),
        ("damping", float("inf")),
        ("weight", -1.0),
        ("weight", 0.0),
        ("weight", (0.0, 0.0)),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("source_sample", 0),
        ("seed", 0.5),
        ("variant", "three_sided"),
        ("epsilon", 0.0),
        ("epsilon", "big"),
    ],
)
def test_a_setting_out_of_its_range_is_named_with_its_value(field: str, value: Any) -> None:
    shown = (
        value if isinstance(value, tuple) and field == "weight" else value[-1] if isinstance(value, tuple) else value
    )
    with pytest.raises(PlanError, match=rf"^{field} .*{re.escape(repr(shown))}"):
        Plan(**{field: value})


@pytest.mark.parametrize(
    "given", [{"variant": "one_sided"}, {"epsilon": 2.0}, {"accept_drift": True}, {"keep_pair": True}]
)
def test_settings_of_trajectories_are_refused_by_the_tangent_engine(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f'{next(iter(given))} belongs to engine="trajectories"'):
        Plan(engine="tangent", **given)


def test_a_sample_of_a_source_needs_mini_batches() -> None:
    with pytest.raises(PlanError, match="source_sample belongs to mini-batches"):
        Plan(source_sample=3)


def test_settings_per_checkpoint_must_be_equally_many() -> None:
    with pytest.raises(PlanError, match=r"equally many.*'steps': 2.*'lr': 3"):
        Plan(steps=(1, 2), lr=(0.1, 0.1, 0.1))


def test_settings_per_checkpoint_must_be_as_many_as_checkpoints(task: Task) -> None:
    with pytest.raises(PlanError, match="steps has 2 values, but there are 1 checkpoints"):
        _simulate(task, plan=Plan(steps=(1, 2), lr=0.1))


def test_an_unknown_field_of_a_plan_is_named() -> None:
    with pytest.raises(PlanError, match="no field 'temperature'"):
        Plan.from_json({"steps": 3, "temperature": 0.9})


@pytest.mark.parametrize("memory", ["lots", "2 parsecs", "", "1.2.3 GiB", "-1GB", "0", 0, -5])
def test_nonsense_for_memory_is_refused(memory: Any, task: Task, store: Store) -> None:
    with pytest.raises(PlanError, match="memory must be"):
        _simulate(task, memory=memory)
    with pytest.raises(PlanError, match="memory must be"):
        attribute(task, store, _columns(3), memory=memory, progress=False)


def test_a_precision_that_cannot_be_stored_is_refused(task: Task) -> None:
    with pytest.raises(PlanError, match=r"float32, bfloat16, float64, not as torch\.float16"):
        _simulate(task, dtype=torch.float16)


# --- checkpoints and folders


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("2.bias"), r"lacks 2\.bias"),
        (lambda state: state.update({"3.bias": torch.zeros(1)}), r"unknown 3\.bias"),
        (lambda state: state.update({"2.bias": torch.zeros(5)}), r"'2\.bias' has shape \(5,\), the model's is \(2,\)"),
    ],
    ids=["missing", "unknown", "wrong shape"],
)
@pytest.mark.parametrize("from_file", [False, True], ids=["state dict", "file"])
def test_a_checkpoint_that_does_not_fit_names_the_tensor(
    change: Callable[[dict[str, Tensor]], object], words: str, from_file: bool, task: Task, tmp_path: Path
) -> None:
    state: Any = task.state()
    change(state)
    if from_file:
        save_file(state, tmp_path / "state.safetensors")
        state = tmp_path / "state.safetensors"
    with pytest.raises(TaskError, match=words):
        _simulate(task, checkpoints=[state])


def test_a_checkpoint_file_that_does_not_exist_is_named(task: Task, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"absent\.safetensors does not exist"):
        _simulate(task, checkpoints=[tmp_path / "absent.safetensors"])


def test_a_checkpoint_file_that_is_no_safetensors_is_named(task: Task, tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_text("not tensors")
    with pytest.raises(TaskError, match=r"state\.safetensors"):
        _simulate(task, checkpoints=[tmp_path / "state.safetensors"])


def test_a_checkpoint_must_hold_tensors(task: Task) -> None:
    state: dict[str, Any] = {**task.state(), "2.bias": [0.0, 0.0]}
    with pytest.raises(TaskError, match=r"2\.bias.*tensor"):
        _simulate(task, checkpoints=[state])


def test_one_checkpoint_must_be_in_a_list_too(task: Task) -> None:
    with pytest.raises(ImprintError, match=r"checkpoints.*list"):
        _simulate(task, checkpoints=task.state())


def test_no_checkpoints_at_all_is_refused(task: Task) -> None:
    with pytest.raises(PlanError, match="checkpoints is empty"):
        _simulate(task, checkpoints=[])


def test_a_store_does_not_go_into_a_file(task: Task, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("kept")
    with pytest.raises(StoreError, match="store is a file"):
        _simulate(task, out=tmp_path / "store")
    assert (tmp_path / "store").read_text() == "kept"


def test_a_store_does_not_go_into_a_folder_with_other_things(task: Task, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(StoreError, match="holds something else: give a new folder for the store"):
        _simulate(task, out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_a_store_does_not_replace_a_store(task: Task, tmp_path: Path) -> None:
    _simulate(task, out=tmp_path / "store")
    before = (tmp_path / "store" / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match="already holds a store, made otherwise: the plan's steps was"):
        _simulate(task, plan=Plan(steps=7, lr=0.1), out=tmp_path / "store")
    assert (tmp_path / "store" / "manifest.json").read_bytes() == before


# --- queries


@pytest.mark.parametrize(
    "queries",
    [[], (), (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)), iter(())],
    ids=["list", "tuple", "columns", "generator"],
)
def test_there_must_be_queries(queries: Any, task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="no queries"):
        attribute(task, store, queries, progress=False)


def test_queries_must_be_iterable(task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="map-style dataset or an iterable of batches, got int"):
        attribute(task, store, 3, progress=False)


def test_a_batch_without_tensors_is_refused(task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="at least one tensor"):
        attribute(task, store, iter([("text", 3)]), progress=False)


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
def test_nan_in_a_query_is_named(readout: Any, task: Task, store: Store) -> None:
    x, y = _columns(4)
    x[2] = torch.nan
    with pytest.raises(ReadoutError, match="query 2"):
        attribute(task, store, (x, y), readout=readout, progress=False)


def test_nan_in_a_later_batch_of_queries_is_named(task: Task, store: Store) -> None:
    x, y = _columns(6)
    x[5] = torch.nan
    with pytest.raises(ReadoutError, match=r"query 1 of its batch|query 5"):
        attribute(task, store, (x, y), batch_size=2, progress=False)


def test_nan_in_self_influence_is_named(task: Task) -> None:
    most = _simulate(task, sources=Sources.groups({f"example {i}": [i] for i in range(N - 1)}))
    x, y = _columns()
    x[7] = torch.nan
    with pytest.raises(ReadoutError, match="7"):
        self_influence(task, most, (x[:-1], y[:-1]), batch_size=5, progress=False)


def test_self_influence_needs_an_example_for_each_source(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match="3 sources, 12 examples"):
        self_influence(task, store, _columns(), progress=False)


def test_an_unknown_readout_is_shown_the_known_ones(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match=r"'backward' is unknown.*jvp, central, literal, gradient"):
        Reader(task, store, readout="backward")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, -1])
def test_top_needs_at_least_one_source(k: int, task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match=f"at least 1 source, got {k}"):
        attribute(task, store, _columns(3), top=k, progress=False)
    with pytest.raises(ReadoutError, match=f"at least 1 source, got {k}"):
        attribute(task, store, _columns(3), progress=False).top(k)


def test_an_unknown_order_is_refused(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match='"magnitude", "raises" or "lowers", not by \'size\''):
        attribute(task, store, _columns(3), top=1, by="size", progress=False)  # type: ignore[call-overload]


@pytest.mark.parametrize("step", [0.0, -1e-3, float("nan")])
def test_the_step_of_central_must_be_positive(step: float, task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match="step"):
        attribute(task, store, _columns(3), readout="central", step=step, progress=False)


def test_literal_is_refused_where_the_engine_makes_no_end_points(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match=r"literal readout needs both perturbed end points.*keep_pair=True"):
        attribute(task, store, _columns(3), readout="literal", progress=False)


def test_literal_is_refused_where_the_pair_was_not_kept(task: Task) -> None:
    without = _simulate(task, plan=Plan(engine="trajectories", steps=2, lr=0.1))
    with pytest.raises(ReadoutError, match=r"both perturbed end points.*keep_pair=True"):
        attribute(task, without, _columns(3), readout="literal", progress=False)


# --- a store of another task


def test_a_store_is_refused_by_a_task_that_selects_less(store: Store) -> None:
    with pytest.raises(
        StoreError, match=r"store has imprints of parameter '0\.weight', which the task does not select"
    ):
        attribute(Task.classifier(_model(), parameters="2.*"), store, _columns(3), progress=False)


def test_a_store_is_refused_by_a_task_that_selects_more() -> None:
    less = _simulate(Task.classifier(_model(), parameters="2.*"))
    with pytest.raises(StoreError, match=r"task selects parameter '0\.weight', of which the store has no imprints"):
        attribute(Task.classifier(_model()), less, _columns(3), progress=False)


def test_a_store_is_refused_by_a_model_of_another_shape(store: Store) -> None:
    with pytest.raises(StoreError, match=r"'0\.weight' was \(4, 3\) of torch\.float32.*task's is \(4, 5\)"):
        attribute(Task.classifier(_model(features=5)), store, _columns(3), progress=False)


def test_a_store_is_refused_by_a_model_of_another_precision(store: Store) -> None:
    with pytest.raises(StoreError, match=r"torch\.float32.*torch\.float64"):
        attribute(Task.classifier(_model().double()), store, _columns(3), progress=False)
