"""What is wrong with a task is refused with an error that names it."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, ReadoutError, Store, Task, TaskError, attribute
from tests.bad_input.inputs import PLAN, columns, each_loss, mean_loss, simulated, small_model


def test_a_scalar_loss_is_told_about_reduction() -> None:
    with pytest.raises(TaskError, match=r'loss must return one value per example, shape \(12,\).*reduction="none"'):
        simulated(Task(small_model(), mean_loss))


def test_a_loss_of_the_wrong_shape_is_shown_its_shape() -> None:
    with pytest.raises(TaskError, match=r"one value per example.*shape \(12, 2\)"):
        simulated(Task(small_model(), lambda model, batch: model(batch[0])))


def test_a_loss_that_is_no_tensor_is_told_so() -> None:
    with pytest.raises(TaskError, match=r"one value per example.*a float"):
        simulated(Task(small_model(), lambda model, batch: 0.0))  # type: ignore[arg-type, return-value]


def test_a_loss_that_fails_shows_its_own_error() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(TaskError, match=r"loss function failed on a few examples.*no such column"):
        simulated(Task(small_model(), loss))


def test_a_scalar_measure_is_refused(store: Store) -> None:
    with pytest.raises(TaskError, match=r"measure must return one value per query, shape \(3,\)"):
        attribute(Task(small_model(), each_loss, measure=mean_loss), store, columns(3), progress=False)


def test_a_measure_that_fails_shows_its_own_error(store: Store) -> None:
    def measure(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(ReadoutError, match=r"measurement failed.*no such column"):
        attribute(Task(small_model(), each_loss, measure=measure), store, columns(3), progress=False)


def test_a_regulariser_must_be_a_scalar() -> None:
    with pytest.raises(TaskError, match=r"regulariser must return a scalar, got shape \(4,\)"):
        simulated(Task.classifier(small_model(), regulariser=lambda model: model[0].bias.square()))


def test_a_regulariser_that_fails_shows_its_own_error() -> None:
    def regulariser(model: nn.Module) -> Tensor:
        raise KeyError("no such layer")

    with pytest.raises(TaskError, match=r"regulariser.*no such layer"):
        simulated(Task.classifier(small_model(), regulariser=regulariser))


def test_a_glob_that_matches_nothing_is_shown_the_parameters() -> None:
    with pytest.raises(TaskError, match=r"'head\.\*' matches no trainable parameter.*0\.weight"):
        Task.classifier(small_model(), parameters=["0.*", "head.*"])


def test_a_glob_of_frozen_parameters_matches_nothing() -> None:
    model = small_model()
    model.get_submodule("0").requires_grad_(False)
    with pytest.raises(TaskError, match=r"'0\.\*' matches no trainable parameter"):
        Task.classifier(model, parameters="0.*")


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match=r"no trainable parameters.*requires_grad=False"):
        Task.classifier(small_model().requires_grad_(False))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either loss=, or outputs= with output_loss="),
        ({"loss": each_loss, "outputs": each_loss, "output_loss": F.mse_loss}, "either loss=, or outputs="),
        ({"outputs": each_loss}, "outputs= and output_loss= belong together"),
        ({"loss": each_loss, "output_loss": F.mse_loss}, "outputs= and output_loss= belong together"),
    ],
)
def test_a_task_has_one_loss(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        Task(small_model(), **given)


def test_an_unknown_measure_is_shown_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"'accuracy' is unknown.*margin, logprob, logit"):
        Task.classifier(small_model(), measure="accuracy")


def test_a_measure_by_name_needs_outputs() -> None:
    with pytest.raises(TaskError, match=r"'margin' needs the model's outputs.*output_loss="):
        Task(small_model(), each_loss, measure="margin")


def test_a_measure_by_name_needs_targets() -> None:
    task = Task(
        small_model(),
        outputs=lambda model, batch: model(batch["x"]),
        output_loss=lambda z, batch: z.sum(1),
        measure="margin",
    )
    store = simulated(task, {"x": columns()[0]})
    with pytest.raises(TaskError, match=r"needs the right class.*labels"):
        attribute(task, store, {"x": columns(3)[0]}, progress=False)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_other_than_the_models_is_refused(device: str) -> None:
    with pytest.raises(TaskError, match=f"device='{device}' was asked for, but the model is on 'cpu'"):
        simulated(device=device)


def test_a_model_on_the_meta_device_is_refused(store: Store) -> None:
    task = Task.classifier(small_model().to("meta"))
    with pytest.raises(TaskError, match=r"meta device.*load its weights"):
        simulated(task)
    with pytest.raises(TaskError, match=r"meta device.*load its weights"):
        attribute(task, store, columns(3), progress=False)


def test_a_model_on_several_devices_is_refused() -> None:
    model = small_model()
    model.get_submodule("2").to("meta")
    with pytest.raises(TaskError, match=r"several devices.*cpu.*meta"):
        simulated(Task.classifier(model))


def test_a_model_that_no_derivative_takes_is_refused() -> None:
    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).exp()
            h += 1  # exp needs its own output for its derivative
            return h

    for plan in (PLAN, Plan(engine="trajectories", steps=2, lr=0.1)):
        with pytest.raises(TaskError, match=f"{plan.engine} engine cannot differentiate this model.*inplace"):
            simulated(Task.classifier(Overwrites(3, 2)), plan=plan)
