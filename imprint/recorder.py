"""Saves checkpoints for `simulate` from any training loop, and beside them the second moments of Adam."""

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
    """The part of a `torch.optim.Optimizer` that is read."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> Any: ...


def moments_beside(checkpoint: Path) -> Path:
    """Return where the second moments of a checkpoint are, if they were recorded."""
    return checkpoint.with_name(f"{checkpoint.stem}{MOMENTS}")


class Recorder:
    """Saves the model to a folder after some epochs: epoch 3 to checkpoint-000003.safetensors.

    at: the epochs to save, early ones above all; None saves all. Any count that grows will do, such as training steps.
    optimiser: Adam, AdamW or another with `exp_avg_sq` in its state: its second moments, corrected for their bias, are
        saved beside each checkpoint, as checkpoint-000003.moments.safetensors, for `Plan(preconditioner="adam")`.

    A folder is for one training run, which may be resumed: if the first call comes with epoch 6, checkpoints up to
    epoch 5 are its beginning. Those of epoch 6 and later come from another run, or from this one before it was set
    back. They stay on disk, trigger a warning, and are left out of `paths` until they are written again.

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
            raise PlanError(f"at must be a list of epochs, such as at=(1, 2, 4), got {at!r}.")
        if optimiser is not None:
            _refuse_optimiser(optimiser)
        self.folder = Path(folder)
        self._optimiser = optimiser
        self._at = None if at is None else frozenset(map(_check_epoch, at))
        self._last: int | None = None  # the epoch of the latest call
        self._left: set[int] = set()  # epochs in the folder that another training run has left

    def __repr__(self) -> str:
        epochs = "every epoch" if self._at is None else f"at {', '.join(map(str, sorted(self._at)))}"
        return f"Recorder({str(self.folder)!r}, {epochs}: {len(self.paths)} saved)"

    def __call__(self, model: nn.Module, epoch: SupportsIndex) -> None:
        """Save the model if this epoch is one to save; call it after every epoch, saved or not."""
        if not isinstance(model, nn.Module):
            raise PlanError(
                "a recorder is called with the model and the epoch, recorder(model, epoch), got a first argument of "
                f"type {type(model).__name__}: give the model itself, not its state dict."
            )
        epoch = _check_epoch(epoch)
        if self._last is None or epoch < self._last:
            self._begin(epoch)
        self._last = epoch
        if self._wants(epoch):
            moments = {} if self._optimiser is None else second_moments(model, self._optimiser)
            place = self.folder / f"checkpoint-{epoch:06}.safetensors"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                _remove_stale(place, with_moments=bool(moments))
            except OSError as error:
                raise StoreError(f"could not make the folder {self.folder}: {error}.") from error
            if moments:
                write_tensors(moments_beside(place), moments)
            write(place, lambda path: save_model(model, str(path)))
            self._left.discard(epoch)

    @property
    def paths(self) -> list[Path]:
        """The checkpoints of this training run in the folder, in order: what `simulate` takes."""
        found = self._find_checkpoints()
        return [found[epoch] for epoch in sorted(found) if self._wants(epoch) and epoch not in self._left]

    def _begin(self, epoch: int) -> None:
        """Begin or resume a training run at this epoch: checkpoints from then on are not its own."""
        clear_leftovers(self.folder)
        self._left = {found for found in self._find_checkpoints() if found >= epoch}
        if self._left:
            warnings.warn(
                f"{self.folder} holds checkpoints of an earlier training run, from {min(self._left)} to "
                f"{max(self._left)}: they are left out of `paths` until they are written again. Use a folder for each "
                "training run.",
                stacklevel=3,
            )

    def _wants(self, epoch: int) -> bool:
        return self._at is None or epoch in self._at

    def _find_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints in the folder by epoch, whoever wrote them."""
        found = {path.stem.removeprefix("checkpoint-"): path for path in self.folder.glob("checkpoint-*.safetensors")}
        return {int(epoch): path for epoch, path in found.items() if epoch.isdecimal()}


def second_moments(model: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    """Compute v̂ = v/(1 − β₂^t) of each parameter the optimiser has moved; tied ones once, under their first name."""
    decay = {parameter: float(group["betas"][1]) for group in optimiser.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if parameter in decay}
    if not named:
        raise PlanError(
            "the optimiser given to the recorder has none of the model's parameters: was it made for another model?"
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
            f"optimiser must be Adam, AdamW or another with betas and second moments, got a "
            f"{type(optimiser).__name__}: leave it out for others."
        )


def _remove_stale(place: Path, with_moments: bool) -> None:
    """Remove what must not lie beside the new files: at no time does a checkpoint have another's second moments."""
    stale = place if with_moments else moments_beside(place)
    refuse_irregular(stale)
    stale.unlink(missing_ok=True)


def _check_epoch(value: SupportsIndex) -> int:
    """Return a whole number of at least 0 as an int; refuse anything else."""
    try:
        epoch = operator.index(value)
    except TypeError:
        epoch = -1
    if epoch < 0:
        raise PlanError(f"an epoch must be a whole number of at least 0, got {value!r}.")
    return epoch
