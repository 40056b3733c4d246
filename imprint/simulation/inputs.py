"""What a simulation is made from: checked when put together, and hashed so that it can be recognised again."""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch

from imprint.batches import describe_batch
from imprint.checks.soundness import examine
from imprint.compat import has_batch_norm
from imprint.data import Collate, Data, HashData, spread_examples
from imprint.errors import DataError, PlanError, ReliabilityWarning, SimulationError
from imprint.model.dropout import dropouts
from imprint.plan import Checkpoints, Plan, Settings
from imprint.recording.records import Run
from imprint.runtime.notices import Notices
from imprint.simulation.curvature_check import report_curvature
from imprint.simulation.descent import Descent
from imprint.simulation.guards import check_moments_scale, check_unfelt_moments
from imprint.simulation.moments import BATCHES, COMPARED, estimate_moments
from imprint.simulation.preconditioner import Preconditioner, compare
from imprint.simulation.preflight import Result, check_device, own, refuse_nonfinite, warn_half_precision
from imprint.simulation.recorded import (
    check_run,
    choose_plan_for,
    complete_end,
    describe_other_state,
    find_begin,
    find_changed_buffers,
    refuse_both,
    refuse_other_data,
)
from imprint.simulation.states import States
from imprint.sources import Sources, require_sources
from imprint.store.draws import Draws
from imprint.store.fingerprint import DataPrint, of_data, of_each, of_members, of_sources, of_tensors, partly_hashed
from imprint.store.probe_examples import choose_probes
from imprint.store.probing import ProbeValues, describe_modules, evaluate_probes, evaluate_regulariser
from imprint.store.request import DTYPES, DataHashes, ParameterSpec, Probed, Request, specify
from imprint.task import Functional, Parameters, Task, require_task

logger = logging.getLogger(__name__)
BATCH, LARGE_BATCH = 1024, 8192  # examples evaluated at once, where the caller does not say: on a CPU, on a GPU


@dataclass(frozen=True)
class Inputs:
    """Everything the imprints depend on."""

    task: Task
    data: Data
    sources: Sources
    plan: Plan
    states: States
    stored_as: str
    hash_data: HashData = "all"
    notices: Notices = field(default_factory=Notices)
    run: Run | None = None

    @classmethod
    def checked(
        cls,
        task: Task,
        data: Any,
        sources: Sources,
        plan: Plan | None,
        checkpoints: Checkpoints | None,
        *,
        batch_size: int | None,
        collate_fn: Collate | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        hash_data: HashData = "all",
        run: Run | None = None,
    ) -> "Inputs":
        """Check the inputs of a simulation; refuse what does not fit together."""
        if plan is not None and not isinstance(plan, Plan):
            raise PlanError(
                f"plan must be an imprint.Plan, got {plan!r}: for a number of steps Plan(steps=...), and "
                '"auto" to have a plan chosen.'
            )
        require_sources(sources)
        require_task(task)
        plan = choose_plan_for(plan, run)
        task.refuse_changes()
        check_device(task, device)
        size = (LARGE_BATCH if task.device.type == "cuda" else BATCH) if batch_size is None else batch_size
        training = Data(data, device=task.device, batch_size=size, collate_fn=collate_fn)
        sources.check(len(training))
        if plan.source_sample is not None and (plan.batch_size or 0) >= len(training):
            raise PlanError(
                f"source_sample belongs to mini-batches, and batch_size={plan.batch_size} is all of the "
                f"{len(training)} training examples: leave one of them out."
            )
        if run is not None:
            check_run(run, task, len(training), plan)
            refuse_both(checkpoints)
            checkpoints = [complete_end(run, task)]
        stored_as = _stored_dtype(task, dtype)
        inputs = cls(task, training, sources, plan, States(task, checkpoints), stored_as, hash_data, run=run)
        _refuse_plan(task, inputs.plan)
        _refuse_changing(training, hash_data)
        if partial_hash := partly_hashed(hash_data, len(training)):
            inputs.notices.add(partial_hash)
        if run is None:  # which was trained in the precision it has
            warn_half_precision(task)
        elif other_state := describe_other_state(run, task):
            inputs.notices.add(other_state)
        assert inputs.settings  # a plan with settings for other checkpoints is refused here
        return inputs

    @cached_property
    def data_hashes(self) -> DataPrint:
        """The hashes of the data, as far as they are wanted."""
        return of_data(self.data, self.hash_data)

    def refuse_other_data(self) -> None:
        """Refuse other data than the run was recorded with, where the recording has their hash."""
        if self.run is not None:
            refuse_other_data(self.run, self.data_hashes, len(self.data))

    def examine(self) -> None:
        """Try the task on a few examples: refuse what would be silently wrong, and keep what else is to be known."""
        state = self.state(self.first)
        examine(self.task, state, self.data, self.notices)
        if self.plan.rules.second_order:
            kind = self.plan.seen_curvature
            report_curvature(*self.task.at(state), self.data, kind, self.notices)

    @property
    def settings(self) -> list[Settings]:
        """What the plan says about each checkpoint; the steps to a recorded end are those that are repeated."""
        planned = [self.plan.at(k, len(self.states)) for k in range(len(self.states))]
        if self.run is None:
            return planned
        steps = len(self.run.steps) - find_begin(self.run, self.plan.start)
        return [replace(settings, steps=steps) for settings in planned]

    @property
    def draws(self) -> Draws | None:
        """What dropout along the path is drawn with; None for a plan without."""
        return Draws(self.data.batch_size, self.task.device.type) if self.plan.dropout else None

    @property
    def first(self) -> int:
        """The first checkpoint that is simulated."""
        return next(k for k, setting in enumerate(self.settings) if setting.weight > 0)

    def state(self, index: int) -> Parameters:
        """Return a checkpoint as a complete and finite state."""
        state = self.states[index]
        refuse_nonfinite(state, index, len(self.states))
        return state

    @cached_property
    def buffers(self) -> dict[str, ParameterSpec]:
        """The floating-point buffers that the recorded run changed, which imprints displace like parameters."""
        return {} if self.run is None else find_changed_buffers(self.run, self.task)

    @cached_property
    def fixed(self) -> Parameters:
        """The model's own parameters that all checkpoints share with it, of those that training leaves alone."""
        shared = self.task.own(self.task.fixed)
        for index, setting in enumerate(self.settings):
            if setting.weight > 0 and shared:
                state = self.states[index]
                shared = {name: tensor for name, tensor in shared.items() if torch.equal(tensor, state[name])}
        return shared

    def without_fixed(self, state: Parameters) -> Parameters:
        """Return what a store keeps of a state."""
        return {name: tensor for name, tensor in state.items() if name not in self.fixed}

    def _read(self, index: int) -> Parameters:
        """Return a checkpoint; one that is skipped may hold anything."""
        return self.state(index) if self.settings[index].weight > 0 else self.states[index]

    def descent(self, index: int, state: Parameters) -> Descent:
        """Return the descent of all sources from a checkpoint; a step size that the plan leaves open is 1."""
        functional, theta = self.task.at(state)
        theta |= {name: state[name] for name in self.buffers}
        settings = self.settings[index]
        step = 1.0 if settings.lr == "auto" else settings.lr
        descent = Descent(
            functional,
            theta,
            self.data,
            self.sources,
            self.plan,
            1 if settings.steps == "infinite" else settings.steps,
            lr=step,
            damping=settings.damping,
        )
        return replace(descent, preconditioner=self._preconditioner(index, descent))

    def notice(self, found: ReliabilityWarning | None) -> None:
        """Keep what a guard has found, if it has found something."""
        if found is not None:
            self.notices.add(str(found))

    def _preconditioner(self, index: int, descent: Descent) -> Preconditioner | None:
        if self.plan.preconditioner is None:
            return None
        recorded = self.states.moments(index)
        if recorded is not None:
            found = compare(recorded, estimate_moments(descent, COMPARED))
            self.notice(check_unfelt_moments(index, found, has_batch_norm(self.task.model)))
            self.notice(check_moments_scale(index, found))
            return Preconditioner.adam(found.fitted, "recorded")
        logger.info("checkpoint %d: second moments are estimated from the gradients of %d batches", index, BATCHES)
        return Preconditioner.adam(estimate_moments(descent), "estimated")

    def _moments(self, index: int) -> str | None:
        """Hash the second moments that came with a checkpoint; None where none are wanted, or none came."""
        wanted = self.plan.preconditioner is not None and self.settings[index].weight > 0
        recorded = self.states.moments(index) if wanted else None
        return None if recorded is None else of_tensors(recorded)

    def request(self) -> Request:
        """Return everything the imprints depend on; a store is resumed and reused for the same request only."""
        first = self.state(self.first)
        functional, theta = self.task.at(first)
        examples = self._own_loss(choose_probes, functional, theta, self.data)
        seen = self._seen_at(functional, theta, examples)
        pulls = own("regulariser failed", evaluate_regulariser, functional, theta)
        self._refuse_nonfinite(pulls)
        every = range(len(self.states))
        self.refuse_other_data()
        states = [of_tensors(first if index == self.first else self._read(index)) for index in every]
        _warn_same(states)
        return Request(
            n=len(self.data),
            dtype=self.stored_as,
            plan=self.plan,
            parameters=specify(self.task),
            fixed=of_each(self.fixed),
            states=tuple(states),
            moments=tuple(self._moments(index) for index in every),
            sources=of_sources(self.sources),
            members=of_members(self.sources),
            data=DataHashes(**self.data_hashes),
            probes=Probed(examples, seen),
            modules=describe_modules(self.task.model),
            regulariser=tuple(pulls),
            buffers=self.buffers,
            recording=None if self.run is None else self.run.sha256,
            runs=self.states.runs,
        )

    @cached_property
    def probes(self) -> list[int]:
        """The training examples that the loss is recognised by."""
        return self._own_loss(choose_probes, *self.task.at(self.state(self.first)), self.data)

    def seen(self, examples: list[int]) -> ProbeValues:
        """Return what the task computes on some examples, at the first checkpoint and around it."""
        return self._seen_at(*self.task.at(self.state(self.first)), examples)

    def _seen_at(self, functional: Functional, theta: Parameters, examples: list[int]) -> ProbeValues:
        batch = self.data.gather(torch.tensor(examples))
        wanted = self.plan.seen_curvature == "gauss-newton"
        found = self._own_loss(
            partial(evaluate_probes, outputs=wanted, gradients=True), functional, theta, batch, len(examples)
        )
        for example, loss in zip(examples, found.losses, strict=True):
            if not math.isfinite(loss):
                owner = self.sources.owner(example)
                raise SimulationError(
                    f"the loss of training example {example}{owner} is {loss}: look for NaN or infinity in that "
                    "example, or a loss that is undefined there."
                )
        return found

    def _own_loss(self, call: Callable[..., Result], *given: Any) -> Result:
        few = describe_batch(self.data.gather(spread_examples(len(self.data))))
        return own(
            f"loss function failed on a few examples, called as loss(model, batch) with batch = {few}",
            call,
            *given,
        )

    def _refuse_nonfinite(self, pulls: list[float]) -> None:
        for pull in pulls:
            if not math.isfinite(pull):
                raise SimulationError(f"the regulariser is {pull} at or near the first checkpoint.")


def _refuse_plan(task: Task, plan: Plan) -> None:
    """Refuse a plan that asks of a task what it does not have."""
    if plan.seen_curvature == "gauss-newton" and task.outputs is None:
        raise PlanError(
            "the Gauss–Newton curvature needs to see the model's outputs: give the task outputs= and output_loss= "
            "instead of loss= (Task.classifier and Task.regression do), or a plan that does without it, such as "
            f'Plan(engine="{plan.engine}", curvature="hessian").'
        )
    if plan.dropout and not dropouts(task.model):
        raise PlanError("dropout=True asks for dropout along the path, and the model has no dropout module.")


def _refuse_changing(data: Data, how: HashData) -> None:
    """Refuse data that changes from reading to reading, unless the caller says so."""
    if how not in get_args(HashData):
        raise DataError(f"hash_data must be one of {', '.join(get_args(HashData))}, got {how!r}.")
    if how != "none" and (example := data.changing_example()) is not None:
        raise DataError(
            f"training example {example} changes each time it is read, as with random augmentation: scores "
            "would differ from call to call. Give a fixed view of the data (without augmentation, or with random "
            "numbers seeded by the index, and with a collate_fn that changes no sample in place), or "
            'hash_data="none" to go on without comparing data.'
        )


def _warn_same(states: list[str]) -> None:
    for index, state in enumerate(states):
        if (first := states.index(state)) != index:
            warnings.warn(
                f"checkpoints {first} and {index} have the same weights: a state dict that is kept while training "
                "continues must be cloned, {name: tensor.clone() for name, tensor in model.state_dict().items()}.",
                stacklevel=5,
            )
            return


def _stored_dtype(task: Task, dtype: torch.dtype | None) -> str:
    if dtype is None:
        widest = max((task.model.get_parameter(name).dtype for name in task.names), key=lambda d: d.itemsize)
        dtype = widest if widest in (torch.float32, torch.float64) else torch.float32
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise PlanError(f"imprints can be stored as {', '.join(DTYPES)}, not as {dtype}.")
