"""Records the run of a transformers Trainer, so that it can be repeated step by step: `attach(trainer, folder)`.

A callback alone does not learn which examples are trained on. So the loader that the Trainer builds for its training
data carries their indices (`numbering.py`), and its `training_step` hands them to the recorder with what the loss is
divided by (`trainers.py`). Evaluations go through neither, and recomputed activations through no second training step.
"""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from imprint.errors import DataError, MissingExtra, PlanError, ReliabilityWarning
from imprint.language.numbering import NumberedCollator, NumberedData, take_indices
from imprint.language.trainers import count_normaliser, refuse_data, refuse_settings
from imprint.recording.folder import refuse_finished
from imprint.recording.header import RECORD, read_header
from imprint.recording.reading import Recording
from imprint.recording.records import Clipping
from imprint.recording.seeding import keep_random_state
from imprint.recording.steps import RunStep
from imprint.recording.watching import ForwardHook
from imprint.recording.writing import RunRecorder
from imprint.tensors.vectors import total_norm

try:
    from transformers import TrainerCallback
except ImportError:  # reported when one is made
    TrainerCallback = object


def attach(trainer: Any, folder: str | os.PathLike[str], *, every: int | None = None) -> "TrainerRecorder":
    """Record the coming run of a Trainer in a folder; call it before `trainer.train()`.

    every: after how many steps the model and the optimiser are saved, besides start and end; as of `RunRecorder`.

    What is attached can be given to `simulate` as the run, with the Trainer's data and the collator that it uses:

        run = language.recording.attach(trainer, "runs/train")
        trainer.train()
        task = language.task(model)
        store = imprint.simulate(task, trainer.train_dataset, sources, run=run, collate_fn=run.collate_fn)

    A training that is resumed, `trainer.train(resume_from_checkpoint=...)`, goes on recording in the same folder. The
    recording ends with the last step, also if the Trainer then loads its best checkpoint. Random numbers of each
    micro-batch are drawn from a seed of its own; those of the loader stay the Trainer's.

    A folder with a finished recording is refused: `imprint.Recording(folder)` opens it, without a Trainer.
    """
    if TrainerCallback is object:
        raise MissingExtra("language.recording.attach", "language")
    if not hasattr(trainer, "training_step") or not hasattr(trainer, "callback_handler"):
        raise PlanError(f"attach takes a Trainer of transformers, got a {type(trainer).__name__}.")
    if (Path(folder) / RECORD).exists():
        refuse_finished(Path(folder), read_header(Path(folder)))
    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, TrainerRecorder):
            callback.detach()
    return TrainerRecorder(trainer, folder, every)


class TrainerRecorder(TrainerCallback):  # type: ignore[misc]
    """Records the run of a Trainer; `attach` makes it.

    folder: where the recording is; `simulate` takes this object itself as the run.
    collate_fn: collates training examples as the Trainer does, without the columns that it leaves out.
    """

    def __init__(self, trainer: Any, folder: str | os.PathLike[str], every: int | None) -> None:
        refuse_settings(trainer)
        self.folder = Path(folder)
        self.collate_fn: Callable[[list[Any]], Any] = _collator(trainer)
        refuse_data(trainer.train_dataset, self.collate_fn)
        self._trainer, self._every = trainer, every
        self._run: RunRecorder | None = None
        self._step: RunStep | None = None
        self._hook: Any = None
        self._norm: Tensor | None = None  # of all gradients of the step, before the Trainer clips them
        self._train, self._train_step, self._load = trainer.train, trainer.training_step, trainer.get_train_dataloader
        trainer.train, trainer.training_step = self._train_or_close, self._record_micro_batch
        trainer.get_train_dataloader = self._number_loader
        trainer.callback_handler.callbacks.insert(0, self)  # so that gradients that others change are seen

    def __repr__(self) -> str:
        inner = "not begun" if self._run is None else f"{self._run.steps} steps"
        return f"TrainerRecorder({str(self.folder)!r}, {inner})"

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def paths(self) -> list[Path]:
        """The checkpoints of the finished run, in order, as `simulate(checkpoints=...)` takes them."""
        return self.finish().paths

    def finish(self) -> Recording:
        """Return the recording of the finished run."""
        if self._run is None:
            raise PlanError(f"nothing is recorded in {self.folder} yet: call trainer.train() first.")
        return self._run.finish()

    def detach(self) -> None:
        """Have the Trainer train as if it had never been recorded; what is recorded stays in the folder."""
        self._close()
        trainer = self._trainer
        trainer.train, trainer.training_step, trainer.get_train_dataloader = self._train, self._train_step, self._load
        trainer.remove_callback(self)

    # --- what the Trainer does

    def _train_or_close(self, *given: Any, **options: Any) -> Any:
        """Train, and leave the folder for a resumed training if this one fails."""
        try:
            return self._train(*given, **options)
        except BaseException:
            self._close()
            raise

    def _number_loader(self) -> Any:
        """Build the training loader as the Trainer does, of samples that carry their indices."""
        trainer = self._trainer
        dataset, collator = trainer.train_dataset, trainer.data_collator
        trainer.train_dataset, trainer.data_collator = NumberedData(dataset), NumberedCollator(self.collate_fn)
        try:
            return self._load()
        finally:
            trainer.train_dataset, trainer.data_collator = dataset, collator

    def _record_micro_batch(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take the training step of a micro-batch as the Trainer does, with its own random numbers."""
        indices = take_indices(inputs)
        if self._run is None or indices is None:
            raise DataError(
                "a batch of the Trainer has no indices, so that the recording cannot tell which examples it has: "
                "build the loader of get_train_dataloader from self.train_dataset and self.data_collator, and train "
                "with trainer.train()."
            )
        if self._step is None:
            self._step = self._run.step()
            self._step.__enter__()
        normaliser = count_normaliser(self._trainer, inputs, num_items_in_batch)
        with keep_random_state():
            self._step.batch(indices, normaliser)
            loss: Tensor = self._train_step(model, inputs, num_items_in_batch)
        self._step.note_loss(loss)
        if self._trainer.accelerator.sync_gradients:  # the last micro-batch of the step
            gradients = [p.grad for p in self._run.model.parameters() if p.grad is not None]
            self._norm = total_norm(gradients)
        return loss

    # --- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer when model and optimiser are there, at the start or where a checkpoint was left."""
        if state.is_hyper_param_search:
            raise PlanError("a search of hyperparameters is many runs, and a recording is of one: attach to that one.")
        self._close()
        optimiser = getattr(given["optimizer"], "optimizer", given["optimizer"])  # accelerate wraps it
        remembers = any(group.get("betas") or group.get("momentum") for group in optimiser.param_groups)
        if state.global_step and remembers and not optimiser.state:
            raise PlanError(
                f"the training resumes at step {state.global_step} without what its optimiser remembered, which a "
                "replay would not forget: resume from a checkpoint that was saved without save_only_model."
            )
        self._run = RunRecorder(
            self.folder,
            given["model"],
            optimiser,
            data=self._trainer.train_dataset,
            collate_fn=self.collate_fn,
            every=self._every,
            seed=args.seed,
            step=state.global_step,
        )
        self._hook = given["model"].register_forward_pre_hook(ForwardHook(self._observe), prepend=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer when it has clipped the gradients; without a limit it multiplies them by 1."""
        if self._step is not None:
            limit = args.max_grad_norm
            clips = limit and 0 < limit < math.inf
            self._step.note_clipping(Clipping("norm", float(limit)) if clips else None, self._norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer after every step of its optimiser."""
        self._end_step(succeeded=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Called by the Trainer with the figures of the whole run, before it loads its best checkpoint."""
        if logs and "train_runtime" in logs and self._run is not None:
            self._end_step(succeeded=False)  # the Trainer was stopped in the middle of it
            self._run.finish()
            self._hook.remove()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer when it is done."""
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best and Path(best).name != f"checkpoint-{state.global_step}":
            warnings.warn(
                f"the recording ends with step {state.global_step}, the last one, and the Trainer has then loaded its "
                f"best checkpoint, {Path(best).name}: a replay describes the model of the last step, not the one "
                "you now hold.",
                ReliabilityWarning,
                stacklevel=2,
            )

    def _observe(self) -> None:
        """Show the recorder how forward passes run: accelerate turns autocast on within that of the model."""
        if self._run is not None:
            with self._trainer.accelerator.autocast():
                self._run.observe_forward()

    def _end_step(self, *, succeeded: bool) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None if succeeded else KeyboardInterrupt, None, None)

    def _close(self) -> None:
        """Leave a run that did not come to its end; its steps up to a checkpoint can be resumed."""
        self._end_step(succeeded=False)
        if self._run is not None:
            self._run.close()
            self._hook.remove()


def _collator(trainer: Any) -> Callable[[list[Any]], Any]:
    """Return the function that makes the Trainer's batches, less the columns that its model does not take."""
    collate: Callable[[list[Any]], Any] = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    return collate
