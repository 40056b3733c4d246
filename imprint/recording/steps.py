"""One step of a run while it is recorded: its micro-batches, its backward passes, clipping, the optimiser's step."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from imprint.errors import PlanError
from imprint.recording.records import Clipping, MicroBatch, Settings, Step, micro_seed
from imprint.recording.seeding import seed_everything
from imprint.recording.settings import find_changes
from imprint.recording.watching import Gradients

Indices = Tensor | Sequence[int]


class Owner(Protocol):
    """What a step tells of itself; a `RunRecorder` is one."""

    def begin_batch(self) -> None: ...
    def end_step(self, step: "RunStep", succeeded: bool) -> None: ...


class RunStep:
    """Records one step of the optimiser; `RunRecorder.step` makes it, and `with` opens and ends it.

    number: counts steps from 1.
    inside: whether the optimiser is making its step; `stepped` whether it has made it.
    owner: is told when a micro-batch begins and when the step ends.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        n: int,
        parameters: Iterable[Tensor],
        gradients: Gradients,
        owner: "Owner",
    ) -> None:
        self.number, self.seed = number, seed
        self._n, self._parameters, self._gradients, self._owner = n, list(parameters), gradients, owner
        self._batches: list[tuple[tuple[int, ...], float | None, list[Tensor]]] = []
        self._norm: Tensor | None = None
        self._clipping: Clipping | None = None
        self._passes_at_clipping = 0
        self._groups: tuple[Settings, ...] = ()
        self._left: tuple[Settings, ...] = ()
        self._missing: frozenset[str] = frozenset()
        self._closure = False
        self.inside = False
        self.stepped = False

    def __enter__(self) -> "RunStep":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._owner.end_step(self, kind is None)

    # --- what the training loop says

    def batch(self, indices: Indices, normaliser: float | Tensor | None = None) -> None:
        """Begin a micro-batch of these examples and seed all random numbers for it.

        normaliser: what the sum of the examples' losses is divided by; by default the number of examples times the
            number of micro-batches of the step, which suits a mean loss divided by the number of micro-batches.
        """
        examples = check_indices(indices, self._n)
        if normaliser is not None and not (math.isfinite(normaliser) and normaliser > 0):
            raise PlanError(f"normaliser must be a positive number, got {normaliser!r}.")
        if self.stepped:
            raise PlanError(f"a batch was given after the optimiser's step {self.number}: begin another run.step().")
        self._refuse_changed_gradients()
        self._owner.begin_batch()
        self._batches.append((examples, None if normaliser is None else float(normaliser), []))
        seed_everything(micro_seed(self.seed, len(self._batches) - 1))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Record the loss of the present micro-batch, and call `loss.backward()`."""
        if loss.numel() != 1:
            raise PlanError(f"loss must be one number, got a tensor of shape {tuple(loss.shape)}.")
        self.note_loss(loss)
        loss.backward(**options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
        """Clip all gradients together, as torch.nn.utils.clip_grad_norm_ does; return their norm before that.

        max_norm: the limit; without one (infinity) the norm is returned and nothing is clipped or recorded.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        _require(max_norm >= 0, "max_norm must be a number of at least 0, or infinity for no clipping", max_norm)
        _require(norm_type > 0, "norm_type must be a positive number or infinity", norm_type)
        if max_norm == math.inf:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            return nn.utils.get_total_norm(gradients, norm_type, **options)
        self._before_clipping()
        if norm_type != 2.0:
            self._norm = self._gradients.norm()
        total = nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type, **options)
        self.note_clipping(Clipping("norm", max_norm, norm_type), total if norm_type == 2.0 else None)
        return total

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip all gradients value by value, as torch.nn.utils.clip_grad_value_ does; without a limit, do nothing."""
        _require(clip_value >= 0, "clip_value must be a number of at least 0, or infinity for no clipping", clip_value)
        if clip_value == math.inf:
            return
        self._before_clipping()
        self._norm = self._gradients.norm()
        nn.utils.clip_grad_value_(self._parameters, clip_value)
        self.note_clipping(Clipping("value", float(clip_value)))

    # --- what is known from elsewhere, such as from a Trainer

    def note_loss(self, loss: Tensor) -> None:
        """Record a loss that is, or was, minimised; several of one micro-batch are added."""
        if not self._batches:
            raise PlanError(
                "the step has no examples yet: give their indices, run.step(indices) or step.batch(indices)."
            )
        losses = self._batches[-1][2]
        if not (self.inside and losses):  # of a closure, the first evaluation counts
            losses.append(loss.detach())

    def note_clipping(self, clipping: Clipping | None, norm: Tensor | float | None = None) -> None:
        """Record that the gradients have just been clipped, and their Euclidean norm before that.

        clipping: None if they were written to without a change, such as by a clipping without a limit.
        """
        self._clipping = clipping
        if norm is not None:
            self._norm = torch.as_tensor(norm)
        self._passes_at_clipping = self._gradients.passes
        self._gradients.accept()

    # --- what the optimiser's hooks say

    def before_optimiser(self, groups: tuple[Settings, ...], closure: bool) -> None:
        """Take note of everything that this step of the optimiser depends on."""
        if not self._batches:
            raise PlanError("the optimiser stepped without examples: give their indices, run.step(indices).")
        if self.stepped:
            raise PlanError(
                f"the optimiser stepped a second time within step {self.number}: use one run.step() for each of its "
                "steps, with several step.batch(indices) to accumulate gradients."
            )
        self._gradients.drop_left()
        if not closure:
            self._refuse_changed_gradients()
            if self._clipping is not None and self._passes_at_clipping != self._gradients.passes:
                raise PlanError("gradients were clipped before the last backward pass of the step: clip them after it.")
            self._missing = self._gradients.missing
            if len(self._missing) == len(self._parameters):
                raise PlanError(
                    f"no parameter has a gradient at step {self.number}: was the backward pass forgotten, or made "
                    "before run.step? Call step.backward(loss) within the step; gradients from before it are cleared."
                )
            if self._norm is None:
                self._norm = self._gradients.norm()
        self._groups, self._closure, self.inside = groups, closure, True

    def after_optimiser(self, groups: tuple[Settings, ...]) -> None:
        """Take note that the optimiser has made its step, and what it has changed of its own settings."""
        self._left = find_changes(self._groups, groups)
        if self._closure:
            self._missing, self._norm = self._gradients.missing, None
        self.inside, self.stepped = False, True

    @property
    def moved(self) -> bool:
        """Whether the optimiser has begun to move the parameters."""
        return self.stepped or self.inside

    def finish(self) -> Step:
        """Return the record of the step, once the optimiser has stepped."""
        if not self.stepped:
            raise PlanError(
                f"step {self.number} ended without a step of the optimiser: call optimiser.step() within run.step(). "
                "(A GradScaler leaves out steps and cannot be recorded: train in float32 or bfloat16.)"
            )
        parts = len(self._batches)
        batches = [
            MicroBatch(
                examples,
                normaliser or float(len(examples) * parts),
                self._number(sum(float(loss) for loss in losses), "loss") if losses else None,
            )
            for examples, normaliser, losses in self._batches
        ]
        norm = None if self._norm is None else self._number(float(self._norm), "gradient norm")
        known = (self._clipping, self._missing, self._closure, self._left if any(self._left) else ())
        return Step(tuple(batches), self.seed, self._groups, norm, *known)

    def _number(self, value: float, what: str) -> float:
        if not math.isfinite(value):
            raise PlanError(f"the {what} of step {self.number} is {value}: the run diverged and cannot be replayed.")
        return value

    def _before_clipping(self) -> None:
        self._gradients.drop_left()
        if self._clipping is not None and not self.inside:
            raise PlanError("gradients were clipped twice in one step: a recording keeps one clipping.")
        if not self.inside:
            self._refuse_changed_gradients()

    def _refuse_changed_gradients(self) -> None:
        if (name := self._gradients.find_changed()) is not None:
            raise PlanError(
                f"the gradient of {name!r} was changed between backward() and the optimiser's step {self.number}: clip "
                "with step.clip_grad_norm_(limit) or step.clip_grad_value_(limit), so that it is recorded, and call "
                "zero_grad() before backward() only. Other changes, such as those of a GradScaler or a callback, "
                "cannot be replayed."
            )


def _require(holds: bool, expected: str, given: float) -> None:
    if not holds:
        raise PlanError(f"{expected}, got {given}.")


def check_indices(indices: Indices, n: int) -> tuple[int, ...]:
    """Return the indices of examples as whole numbers; refuse what is none of n examples."""
    found = torch.as_tensor(indices)
    if found.dim() != 1 or found.numel() == 0 or found.is_floating_point() or found.dtype == torch.bool:
        raise PlanError(
            "indices must be a list or a tensor of whole numbers, one for each example of the batch, got "
            f"{found.dtype} of shape {tuple(found.shape)}."
        )
    listed: list[int] = found.tolist()
    if min(listed) < 0 or max(listed) >= n:
        wrong = min(listed) if min(listed) < 0 else max(listed)
        raise PlanError(f"there is no training example {wrong}: indices go from 0 to {n - 1}.")
    return tuple(listed)
