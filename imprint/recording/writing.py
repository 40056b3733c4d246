"""`RunRecorder`: records a training run from its own loop, so that it can be repeated step by step."""

import operator
import os
import time
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from imprint.data import Collate, Data
from imprint.errors import PlanError, ReliabilityWarning, StoreError
from imprint.recording.folder import RecordingFolder
from imprint.recording.order import Walk, count_examples, loaded_batches, shuffled_batches
from imprint.recording.reading import Recording
from imprint.recording.seeding import derive_seed
from imprint.recording.settings import describe_groups, describe_scheduler
from imprint.recording.steps import Indices, RunStep
from imprint.recording.subject import Subject
from imprint.recording.watching import ForwardPasses, Gradients, watch
from imprint.store.fingerprint import of_data


class RunRecorder:
    """Records a training run in a folder: every step, and the model and the optimiser now and then.

    data: the training data, or `n`, the number of its examples, if `batches` and `loader` are not used; data is
        hashed, so that a replay with other data is refused. `collate_fn` collates its examples, as in `simulate`.
    every: after how many steps the model and the optimiser are saved, besides start and end. By default they are
        saved after 10, 20, 40, … steps such that at most eight are kept.
    seed: what orders and random numbers of the run are drawn from. At each micro-batch the recorder seeds torch,
        `random` and numpy.
    scheduler: a learning rate scheduler whose state is to be saved and resumed with the optimiser's.
    step: resume an unfinished recording after so many steps, from a checkpoint of your own; see `resume`.

    >>> import tempfile, torch
    >>> x = torch.randn(32, 3)
    >>> model = nn.Linear(3, 1)
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = RunRecorder(tempfile.mkdtemp(), model, optimiser)
    >>> for indices in run.batches(len(x), 8, epochs=2):
    ...     with run.step(indices) as step:
    ...         optimiser.zero_grad()
    ...         step.backward(model(x[indices]).square().mean())
    ...         _ = step.clip_grad_norm_(1.0)
    ...         optimiser.step()
    >>> recording = run.finish()
    >>> len(recording.steps), recording.steps[0].clipping.limit
    (8, 1.0)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimiser: Optimizer,
        *,
        data: Any = None,
        n: int | None = None,
        collate_fn: Collate | None = None,
        every: int | None = None,
        seed: int = 0,
        scheduler: Any = None,
        step: int | None = None,
    ) -> None:
        if every is not None and (not isinstance(every, int) or every < 1):
            raise PlanError(f"every must be a number of steps of at least 1, got {every!r}.")
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise PlanError(f"seed must be a whole number of at least 0, got {seed!r}.")
        self._every, self._seed = every, seed
        self._subject = Subject(model, optimiser, scheduler)
        examples = None if data is None else Data(data, device="cpu", collate_fn=collate_fn)
        self._data = None if examples is None else of_data(examples)
        self._n = n if examples is None else len(examples)
        self._gradients = Gradients(self._subject.parameters)
        self._step: RunStep | None = None
        self._depth = 0  # steps of the optimiser under way: one may call that of the class it derives from
        self._broken: str | None = None  # why nothing more can be recorded
        self._walk = Walk()
        self._forwards = ForwardPasses(self._subject.model, self._subject.parameters)
        self._made = 0  # steps since the recorder was made
        self._warned = False  # that gradients add up
        self._due = False  # whether the model is to be saved before the next step
        self._seconds, self._since = 0.0, 0.0
        self._recording: Recording | None = None
        self._hooks: list[Any] = []
        self._files = RecordingFolder(folder)
        self.folder = self._files.path
        try:
            self._prepare(step)
        except BaseException:
            self.close()
            raise
        self._hooks = watch(model, optimiser, self)

    def _prepare(self, step: int | None) -> None:
        """Take over what an unfinished recording has, and go on after a step if one is given."""
        header = self._files.header
        self._waits = header is not None  # for resume()
        if header is not None:
            self._subject.refuse_other(header, self._n, self._seed, self._data, self.folder)
            self._n, self._seconds = header.n, header.seconds
            if header.circumstances is not None:
                self._forwards.circumstances = header.circumstances.restore()
        self._loaded = step is not None  # by the user, who may have forgotten it
        if step is not None:
            self._go_back(operator.index(step))

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._subject.model

    @property
    def optimiser(self) -> Optimizer:
        """The optimiser that trains it."""
        return self._subject.optimiser

    def __repr__(self) -> str:
        state = "finished, " if self._recording else ""
        return f"RunRecorder({str(self.folder)!r}, {type(self.optimiser).__name__}: {state}{self.steps} steps)"

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    @property
    def steps(self) -> int:
        """How many steps are recorded."""
        return self._files.steps

    # --- resuming

    def resume(self) -> int:
        """Load the latest checkpoint of an unfinished recording into model and optimiser; return its step.

        Later steps are dropped: the training makes them again. `batches` and `loader` go on from there. In a new
        folder there is nothing to load, and the step is 0.
        """
        header = self._files.header
        if header is None:
            return 0
        if not self._waits:
            raise StoreError(
                f"{self.folder} is being recorded: resume() comes before the first step. To go back to the latest "
                "checkpoint of an interrupted training, call close(), make a new RunRecorder on the folder, and call "
                "resume() of that one."
            )
        kept = self._files.latest()
        self._subject.load(self.folder, kept, header)
        self._go_back(kept.step)
        return kept.step

    def _go_back(self, step: int) -> None:
        """Go on after so many steps."""
        if self._files.header is None:
            if step != 0:
                raise StoreError(f"{self.folder} has no recording: steps 1 to {step} are missing.")
            return
        self._walk.position = self._files.go_back(step)
        self._waits = False

    # --- the order of the data

    def batches(
        self, n: int, batch_size: int, *, epochs: int = 1, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[Tensor]:
        """Yield the indices of each batch of all epochs, in an order drawn from the recorder's seed.

        A resumed run goes on where it stopped, however far ahead batches were read: one counts as used when a step of
        its examples is recorded. Another call yields the epochs that follow.
        """
        if n < 1 or batch_size < 1 or epochs < 1:
            raise PlanError(f"n, batch_size and epochs must be at least 1, got {n}, {batch_size} and {epochs}.")
        self._set_n(n)
        self._refuse_waiting()
        order = shuffled_batches(n, batch_size, seed=self._seed, shuffle=shuffle, drop_last=drop_last)
        return self._walk.follow(order, epochs)

    def loader(self, loader: DataLoader[Any], *, epochs: int = 1) -> Iterator[tuple[list[int], Any]]:
        """Yield (indices, batch) of all epochs of a DataLoader, with its own sampler, workers and collate_fn.

        Each epoch begins with seeds drawn from the recorder's. A resumed run goes on where it stopped: what lies
        before is not read. Another call yields the epochs that follow.
        """
        self._set_n(count_examples(loader))
        self._refuse_waiting()
        return self._walk.follow(loaded_batches(loader, seed=self._seed), epochs)

    def _set_n(self, n: int) -> None:
        if self._n is not None and self._n != n:
            raise PlanError(f"the recording is of {self._n} training examples, got {n}: give the same data.")
        self._n = n

    # --- steps

    def step(self, indices: Indices | None = None, *, normaliser: float | Tensor | None = None) -> RunStep:
        """Begin a step of the optimiser, with the examples of its batch; use it as `with run.step(indices) as step:`.

        Gradients of earlier steps are cleared (set to None), whatever the loop does.
        Without indices, each `step.batch(indices)` begins a micro-batch: their gradients accumulate.
        normaliser: what the sum of the examples' losses is divided by; by default the number of examples.
        """
        self._begin_step()
        assert self._n is not None
        number = self.steps + 1
        seed = derive_seed(self._seed, "step", number)
        step = RunStep(number, seed, self._n, self._subject.parameters.values(), self._gradients, self)
        self._step = step
        if indices is not None:
            try:
                step.batch(indices, normaliser)
            except BaseException:
                self._step, self._gradients.expected = None, False
                raise
        return step

    def _begin_step(self) -> None:
        """Refuse a step that cannot be recorded, begin the recording with the first one, save what is due."""
        self._refuse_waiting()
        if self._step is not None:
            raise PlanError("a step is being recorded: end it before the next one, with run.step() as step: ...")
        if self._n is None:
            raise PlanError(
                "the recorder does not know how many training examples there are: give it data= or n=, or use "
                "run.batches or run.loader."
            )
        self._subject.refuse_untrained()
        self._subject.clear_frozen()
        self._subject.refuse_unfrozen(self.steps + 1)
        self._subject.refuse_changed_frozen()
        if self._gradients.stray is not None:
            raise PlanError(
                f"{self._gradients.stray!r} got a gradient outside of run.step(): call backward() within it, or use "
                "torch.autograd.grad for gradients that no step takes."
            )
        self._subject.refuse_changes("between two steps")
        if self._files.header is None:
            header = self._subject.describe(self._n, self._seed, self._every, self._data)
            self._files.begin(header, self.model, self.optimiser)
        self._compare_with_checkpoint()
        if self._due:
            self._keep()
        if not self._since:
            self._since = time.monotonic()
        self._subject.mark()
        self._gradients.clear()
        self._gradients.expected = True
        self._gradients.thorough = self._made < _THOROUGH

    def _compare_with_checkpoint(self) -> None:
        """Refuse a model that the user has not set back to the step it goes on from, where that can be seen."""
        header = self._files.require_header()
        latest = header.checkpoints[-1]
        if self._loaded and latest.step == self.steps:
            self._subject.refuse_other_state(self.folder, latest, header)
        self._loaded = False

    def begin_batch(self) -> None:
        """Called by a step when a micro-batch begins."""
        self._forwards.begin_batch()

    def end_step(self, step: RunStep, succeeded: bool) -> None:
        """Called by a step at its end: append it to the recording, unless it failed."""
        self._step, self._gradients.expected = None, False
        self._depth = 0  # a step of the optimiser that failed has not ended
        if step.moved:
            self._broken = f"step {step.number} failed after the optimiser had moved the model"
        if not succeeded:
            return
        record = step.finish()
        self._warn_of_accumulation()
        if self._files.require_header().circumstances is None and self._forwards.circumstances is not None:
            self._files.note(self._forwards.circumstances)
        self._walk.take(chain.from_iterable(batch.examples for batch in record.batches))
        self._files.add(record, self._walk.position)
        self._broken = None
        self._made += 1
        self._subject.mark_buffers()
        self._due = self._files.is_due()
        self._seconds, self._since = self._seconds + time.monotonic() - self._since, time.monotonic()

    def _warn_of_accumulation(self) -> None:
        """Warn once of a loop that never clears its gradients, which the steps of a recording do."""
        if self._gradients.accumulates and not self._warned:
            self._warned = True
            warnings.warn(
                "the training loop leaves gradients to add up from step to step, and run.step clears them: recorded, "
                "every step takes its own gradient, and without the recorder the same loop trains another model. Call "
                "optimiser.zero_grad() in every step; to accumulate micro-batches, use step.batch(indices) for each.",
                ReliabilityWarning,
                stacklevel=4,
            )

    def observe_forward(self) -> None:
        """Called before forward passes of the model: take note how the first of a micro-batch runs."""
        if self._step is not None:
            self._forwards.notice(self._step.number)

    def before_optimiser(self, closure: bool) -> None:
        """Called before the optimiser steps."""
        if self._recording is not None or self._broken == _CLOSED:
            return
        if self._depth:
            self._depth += 1
            return
        if self._step is None:
            raise PlanError("the optimiser stepped outside of run.step(): such a step cannot be replayed.")
        self._subject.refuse_regrouping()
        self._subject.refuse_unfrozen(self._step.number)
        self._subject.refuse_changes("before the optimiser stepped", buffers=False)
        if not closure:
            self._forwards.notice_late(self._step.number)
        self._step.before_optimiser(describe_groups(self.optimiser), closure)
        self._depth = 1

    def after_optimiser(self) -> None:
        """Called after the optimiser has stepped."""
        self._depth -= 1
        if self._step is not None and self._depth == 0:
            self._step.after_optimiser(describe_groups(self.optimiser))
            self._subject.mark_parameters()

    # --- the end

    def finish(self) -> Recording:
        """Save the end of the run and return the recording; nothing more can be recorded."""
        if self._recording is not None:
            return self._recording
        self._refuse_waiting()
        header = self._files.header
        if header is None or not self.steps:
            raise PlanError(f"no step was recorded in {self.folder}: put the training loop's steps into run.step().")
        if self._step is not None:
            raise PlanError("a step is being recorded: end it before run.finish().")
        if changed := self._subject.find_change():
            warnings.warn(
                f"{changed!r} was changed after the last step: the recorded end is the model as it is now, which no "
                "replay reaches. Record the run again, and call run.finish() right after the training loop, before "
                "other weights are loaded, such as the best ones.",
                ReliabilityWarning,
                stacklevel=2,
            )
        if header.checkpoints[-1].step != self.steps:
            self._keep()
        self._files.finish(self._seconds)
        self._recording = Recording(self._files.place, type(self.optimiser))
        self.close()
        return self._recording

    def close(self) -> None:
        """Stop recording without finishing: the folder can be resumed later."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.release()
        self._files.release()
        self._broken = _CLOSED

    def _keep(self) -> None:
        self._files.keep(self.model, self.optimiser, self._seconds, describe_scheduler(self._subject.scheduler))
        self._due = False

    def _refuse_waiting(self) -> None:
        """Refuse to go on with a recording that is closed, broken, or waits to be resumed."""
        if self._broken is not None:
            raise StoreError(
                f"{self.folder} cannot be recorded any further: {self._broken}. Resume it by a new recorder."
            )
        if self._waits:
            raise StoreError(
                f"{self.folder} holds an unfinished recording of {len(self._files.entries)} steps: call run.resume() "
                "to load its latest checkpoint, give step= if you have loaded one of your own, or give a new folder."
            )


_CLOSED = "it is closed"
_THOROUGH = 2  # steps in which gradients are compared by their values
