"""Keeps the checkpoints that imprints want, from any training loop, and beside them the second moments of Adam."""

import operator
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

from safetensors.torch import save_model
from torch import Tensor, nn

from imprint.errors import PlanError, StoreError
from imprint.store.files import clear_leftovers, refuse_irregular, write, write_tensors

MOMENTS = ".moments.safetensors"  # how the names of files with second moments end


class Optimiser(Protocol):
    """What a `torch.optim.Optimizer` shows of itself."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> Any: ...


def moments_beside(checkpoint: Path) -> Path:
    """Where the second moments of a checkpoint are, if they were recorded."""
    return checkpoint.with_name(f"{checkpoint.stem}{MOMENTS}")


class Recorder:
    """Writes the model to a folder when a moment comes that is worth keeping: epoch 3 to checkpoint-000003.safetensors.

    at: which moments, such as epochs, early ones above all; None keeps every one it is called with.
    optimiser: Adam, AdamW or another with `exp_avg_sq` in its state: its second moments, corrected for their bias, are
        kept beside each checkpoint, as checkpoint-000003.moments.safetensors, for `Plan(preconditioner="adam")`.

    A folder is for one training, which may be resumed: if the first call comes with epoch 6, checkpoints up to epoch 5
    are its beginning. Those of epoch 6 and later were left by another training, or by this one before it was set back;
    they stay on disk, are warned of, and are left out of `paths` until they are written anew.

    >>> import tempfile
    >>> recorder = Recorder(tempfile.mkdtemp(), at=(1, 3))
    >>> for epoch in range(1, 5):
    ...     recorder(nn.Linear(2, 1), epoch)
    >>> print(*(path.name for path in recorder.paths))
    checkpoint-000001.safetensors checkpoint-000003.safetensors
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        at: Collection[int] | None = None,
        *,
        optimiser: Optimiser | None = None,
    ) -> None:
        if at is not None and (isinstance(at, str) or not isinstance(at, Collection)):
            raise PlanError(f"at is a list of moments, such as at=(1, 2, 4), got {at!r}.")
        if optimiser is not None:
            _refuse_optimiser(optimiser)
        self.folder = Path(folder)
        self._optimiser = optimiser
        self._at = None if at is None else frozenset(map(_moment, at))
        self._last: int | None = None  # the moment of the latest call
        self._left: set[int] = set()  # moments in the folder that another training has left

    def __repr__(self) -> str:
        moments = "every moment" if self._at is None else f"at {', '.join(map(str, sorted(self._at)))}"
        return f"Recorder({str(self.folder)!r}, {moments}: {len(self.paths)} kept)"

    def __call__(self, model: nn.Module, moment: SupportsIndex) -> None:
        """Keep the model as it is at this moment, if the moment is worth it; call it at every moment, kept or not."""
        if not isinstance(model, nn.Module):
            raise PlanError(
                "a recorder is called with the model and the moment, recorder(model, epoch), got a first argument of "
                f"type {type(model).__name__}: give the model itself, not its state dict."
            )
        moment = _moment(moment)
        if self._last is None or moment < self._last:
            self._begin(moment)
        self._last = moment
        if self._wants(moment):
            moments = {} if self._optimiser is None else second_moments(model, self._optimiser)
            place = self.folder / f"checkpoint-{moment:06}.safetensors"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                _make_room(place, with_moments=bool(moments))
            except OSError as error:
                raise StoreError(f"could not make the folder {self.folder}: {error}.") from error
            if moments:
                write_tensors(moments_beside(place), moments)
            write(place, lambda path: save_model(model, str(path)))
            self._left.discard(moment)

    @property
    def paths(self) -> list[Path]:
        """The checkpoints of this training in the folder, in order: what `simulate` takes."""
        held = self._held()
        return [held[moment] for moment in sorted(held) if self._wants(moment) and moment not in self._left]

    def _begin(self, moment: int) -> None:
        """A training begins, or goes on, at this moment: what is there from then on is not of it."""
        clear_leftovers(self.folder)
        self._left = {held for held in self._held() if held >= moment}
        if self._left:
            warnings.warn(
                f"{self.folder} holds checkpoints of an earlier training, from {min(self._left)} to {max(self._left)}: "
                "they are left out of `paths` until they are written anew. Take a folder for each training.",
                stacklevel=3,
            )

    def _wants(self, moment: int) -> bool:
        return self._at is None or moment in self._at

    def _held(self) -> dict[int, Path]:
        """The checkpoints in the folder by moment, whoever wrote them."""
        found = {path.stem.removeprefix("checkpoint-"): path for path in self.folder.glob("checkpoint-*.safetensors")}
        return {int(moment): path for moment, path in found.items() if moment.isdecimal()}


def second_moments(model: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    """v̂ = v/(1 − β₂^t) of each parameter that the optimiser has moved; tied ones once, under their first name."""
    decay = {parameter: float(group["betas"][1]) for group in optimiser.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if parameter in decay}
    if not named:
        raise PlanError(
            "the optimiser given to the recorder has none of the model's parameters: is it of another model?"
        )
    moments = {}
    for name, parameter in named.items():
        about = optimiser.state.get(parameter)
        if not about or not (steps := float(about.get("step", 1))):  # it has had no gradient yet
            continue
        if "exp_avg_sq" not in about or "step" not in about:
            raise PlanError(
                f"the optimiser given to the recorder, {type(optimiser).__name__}, keeps no second moments: of "
                f"parameter {name!r} it has {', '.join(map(str, about))}, where exp_avg_sq and step are needed."
            )
        raw = about.get("max_exp_avg_sq", about["exp_avg_sq"])  # the former, with amsgrad, is what divides the steps
        moments[name] = (raw.detach() / (1 - decay[parameter] ** steps)).cpu().contiguous()
    return moments


def _refuse_optimiser(optimiser: Optimiser) -> None:
    groups = getattr(optimiser, "param_groups", None)
    if not groups or not hasattr(optimiser, "state") or any("betas" not in group for group in groups):
        raise PlanError(
            f"optimiser is Adam, AdamW or another with betas and second moments, got a {type(optimiser).__name__}: "
            "leave it out for others."
        )


def _make_room(place: Path, with_moments: bool) -> None:
    """Remove what may not be beside the new files of a moment: at no time does a checkpoint have others' moments."""
    stale = place if with_moments else moments_beside(place)
    refuse_irregular(stale)
    stale.unlink(missing_ok=True)


def _moment(value: SupportsIndex) -> int:
    """A whole number of at least 0, as an int."""
    try:
        moment = operator.index(value)
    except TypeError:
        moment = -1
    if moment < 0:
        raise PlanError(f"a moment is a whole number of at least 0, such as an epoch, got {value!r}.")
    return moment
