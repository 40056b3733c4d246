"""`Recording`: a finished recording as a replay, a task and other engines read it."""

import os
from pathlib import Path

from torch.optim import Optimizer

from imprint.display import count_of, name_some
from imprint.errors import StoreError, TaskError
from imprint.recording.checkpoints import read_optimiser_state, read_state
from imprint.recording.header import Header, Kept, hash_frozen, read_header
from imprint.recording.journal import STEPS, read_journal
from imprint.recording.records import Circumstances, OptimiserState, Step
from imprint.recording.settings import find_class
from imprint.store.addresses import elsewhere
from imprint.store.files import sha256
from imprint.store.fingerprint import DataPrint
from imprint.store.remote import open_whole
from imprint.task import Parameters, Task


class Recording:
    """Reads the recording of a training run that `RunRecorder` has finished.

    path: its folder, or the address of one in a bucket, which is downloaded as a whole.
    optimiser: the class of the run's optimiser, if it is none of torch.optim.

    >>> import tempfile, torch
    >>> from imprint import RunRecorder
    >>> model = torch.nn.Linear(2, 1)
    >>> folder = tempfile.mkdtemp()
    >>> with RunRecorder(folder, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    ...     for indices in run.batches(8, 4, epochs=2):
    ...         with run.step(indices) as step:
    ...             run.optimiser.zero_grad()
    ...             step.backward(model(torch.ones(4, 2)).mean())
    ...             run.optimiser.step()
    >>> recording = Recording(folder)
    >>> len(recording.steps), recording.steps[0].groups[0].get("lr"), recording.checkpoints
    (4, 0.1, (0, 4))
    """

    def __init__(self, path: str | os.PathLike[str], optimiser: type[Optimizer] | None = None) -> None:
        self.path, self._given = open_whole(path), (elsewhere(path), optimiser)
        self._header = _read_finished(self.path)
        self._optimiser = find_class(self._header.optimiser, optimiser)
        self._steps = _read_steps(self.path, self._header)
        for kept in self._header.checkpoints:
            for file in kept.files:
                if not (self.path / file.path).is_file():
                    raise StoreError(f"{self.path / file.path} is missing: the recording has lost a checkpoint.")

    def __reduce__(self) -> tuple[type["Recording"], tuple[str, type[Optimizer] | None]]:
        return Recording, self._given  # another machine opens the address itself, and not the copy on this one

    def __repr__(self) -> str:
        trained = count_of(len(self._header.trained), "trained tensor")
        minutes = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.0f} min"
        return (
            f"Recording({str(self.path)!r}: {count_of(len(self.steps), 'step')} of {self.optimiser.__name__} on "
            f"{count_of(self.n, 'example')}, {trained}, {count_of(len(self.checkpoints), 'checkpoint')}, {minutes})"
        )

    @property
    def n(self) -> int:
        """The number of training examples."""
        return self._header.n

    @property
    def steps(self) -> tuple[Step, ...]:
        """What is known of each step, in order."""
        return self._steps

    @property
    def optimiser(self) -> type[Optimizer]:
        """The class of the optimiser."""
        return self._optimiser

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters in each group of the optimiser."""
        return self._header.groups

    @property
    def circumstances(self) -> Circumstances:
        """How forward passes ran."""
        assert self._header.circumstances is not None  # of a finished one
        return self._header.circumstances.restore()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """After how many steps a whole state was kept; the first is 0, the last is the number of steps."""
        return tuple(kept.step for kept in self._header.checkpoints)

    @property
    def paths(self) -> list[Path]:
        """The files of the checkpoints after the start, in order: what `simulate` takes as checkpoints=."""
        return [self.path / kept.state.path for kept in self._header.checkpoints[1:]]

    @property
    def sha256(self) -> str:
        """Identifies the recording: everything in it but the time it took."""
        return self._header.sha256

    @property
    def data(self) -> DataPrint | None:
        """Hashes of the training data, as `imprint.store.fingerprint` makes them; None if the recorder had no data."""
        return self._header.data

    @property
    def seed(self) -> int:
        """The seed that orders and random numbers of the run were drawn from."""
        return self._header.seed

    @property
    def seconds(self) -> float:
        """How long the training took."""
        return self._header.seconds

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parameters that the run did not train; the recording has only a hash of them."""
        return self._header.frozen

    def state(self, step: int) -> Parameters:
        """Load the trained parameters and the buffers after so many steps, which must be one of `checkpoints`."""
        return read_state(self.path, self._find(step), self._header)

    def optimiser_state(self, step: int) -> OptimiserState:
        """Load what the optimiser remembered after so many steps, which must be one of `checkpoints`."""
        return read_optimiser_state(self.path, self._find(step), self._header)

    def complete(self, task: Task, *steps: int) -> list[Parameters]:
        """Return some of the `checkpoints` with the frozen parameters of the task's model, on its device.

        Refuse a model that has other parameters or buffers than the recorded one, in another precision, or other values
        in the frozen ones.
        """
        states = [self.state(step) for step in steps]
        self._refuse_other_model(task, states[0])
        parameters = dict(task.model.named_parameters())
        frozen = {name: parameters[name].detach() for name in self.frozen}
        return [task.complete({**frozen, **state}) for state in states]

    def _refuse_other_model(self, task: Task, state: Parameters) -> None:
        """Refuse a task of another model than the recorded one, as far as names, dtypes and frozen parameters tell.

        state: any state of the run.
        """
        own, recorded = task.tensors(), {*self._header.trained, *self._header.buffers, *self.frozen}
        if own.keys() != recorded:
            parts = [f"the recording lacks {name_some(sorted(own.keys() - recorded))}"] * bool(own.keys() - recorded)
            parts += [f"the model lacks {name_some(sorted(recorded - own.keys()))}"] * bool(recorded - own.keys())
            raise TaskError(f"{self.path} was recorded from another model: {'; '.join(parts)}.")
        for name, tensor in state.items():
            if own[name].dtype != tensor.dtype:
                raise TaskError(
                    f"{self.path} was recorded in another precision: {name!r} is {tensor.dtype} there and "
                    f"{own[name].dtype} in the model. Build the task from a model in the precision it was trained in."
                )
        parameters = dict(task.model.named_parameters())
        frozen = {name: parameters[name] for name in self.frozen}
        if hash_frozen(frozen, self._header.schema) != self._header.frozen_sha256:
            raise TaskError(
                f"{self.path} was recorded with other values of the {count_of(len(self.frozen), 'frozen parameter')} "
                f"({name_some(self.frozen, 3)}), or with the same in another precision: build the task from the model "
                "that was trained, with what was frozen as it was in training. Parameters that changed without the "
                "optimiser, such as those of a teacher, cannot be replayed."
            )

    def _find(self, step: int) -> Kept:
        for kept in self._header.checkpoints:
            if kept.step == step:
                return kept
        there = name_some(list(map(str, self.checkpoints)), 12)
        raise StoreError(f"{self.path} has no checkpoint of step {step}: it has those of {there}.")


def _read_finished(path: Path) -> Header:
    header = read_header(path)
    if not header.finished:
        raise StoreError(
            f"{path} is the recording of an unfinished run: resume the training, RunRecorder(...).resume(), and call "
            "run.finish() at its end."
        )
    return header


def _read_steps(path: Path, header: Header) -> tuple[Step, ...]:
    place, file = path / STEPS, header.journal
    assert file is not None  # of a finished recording
    steps = tuple(entry.step for entry in read_journal(path, header.groups, header.n))
    expected = header.checkpoints[-1].step
    if len(steps) != expected:
        raise StoreError(f"{place} is damaged: it has {len(steps)} steps, the run had {expected}.")
    if sha256(place) != file.sha256:
        raise StoreError(f"{place} is damaged: it differs from its checksum.")
    return steps
