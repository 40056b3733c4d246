"""The settings of a simulation: validated when made, and written into the store they produce."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from imprint.errors import PlanError

if TYPE_CHECKING:
    from imprint.data import Collate, HashData
    from imprint.runtime.progress import Advance
    from imprint.sources import Sources
    from imprint.task import Task

Curvature = Literal["hessian", "gauss-newton"]
Form = Literal["factored", "dense", "projected"]
Steps = int | Literal["infinite"]
Variant = Literal["two_sided", "mirrored", "one_sided"]
Question = Literal["this_run", "expected"]
"""What a score answers: what removing a source does to the model of this very run, or to a model trained like it."""
Tensors = Mapping[str, Tensor] | str | os.PathLike[str]
State = Tensors | tuple[Tensors, Tensors]
"""A checkpoint: a state dict, a file or a Trainer's folder; or a pair of one and of Adam's second moments."""
Checkpoints = Sequence[State | Sequence[State]]
"""The checkpoints of one training run, or a list of them for each of several runs."""
_choosers: list[Callable[..., "Plan"]] = []


@dataclass(frozen=True)
class EngineRules:
    """How an engine reads a plan; each engine registers its rules.

    fields: the fields of a plan that this engine uses and others may not.
    curvature: what `curvature="auto"` means; `second_order` says whether curvature is used at all.
    infinite: whether `steps` may be "infinite".
    perturbs: whether sources are up- and down-weighted by an ε.
    question: what its scores answer. An engine for "this_run" needs a recorded run, whose steps and learning rates it
        follows instead of the plan's.
    removes: whether imprints are finite removals, N(θ − θ₋b), which must not be differentiated along.
    trial: the settings with which `check` tries the engine; `tried` lists fields of the user's plan to try with them.
    """

    fields: frozenset[str] = frozenset()
    curvature: Curvature = "hessian"
    second_order: bool = True
    infinite: bool = False
    perturbs: bool = False
    question: Question = "expected"
    removes: bool = False
    trial: Mapping[str, Any] = field(default_factory=dict)
    tried: tuple[str, ...] = ()


_engines: dict[str, EngineRules] = {}
_default: list[str] = []
_COMMON = frozenset({"engine", "steps", "lr", "damping", "weight", "seed"})


def register_rules(name: str, rules: EngineRules, *, default: bool = False) -> None:
    """Let plans name an engine."""
    if name in _engines:
        raise PlanError(f"there is an engine {name!r} already: give yours another name, or unregister that one.")
    if unknown := rules.fields - {item.name for item in dataclasses.fields(Plan)}:
        raise PlanError(f"a plan has no field {min(unknown)!r}, which the {name} engine is to use.")
    if common := rules.fields & _COMMON:
        raise PlanError(f"{min(common)} belongs to every engine, so that the {name} engine cannot have it for itself.")
    _engines[name] = rules
    if default:
        _default[:] = [name]


def unregister_rules(name: str) -> None:
    """Forget an engine."""
    del _engines[name]


def engine_names() -> tuple[str, ...]:
    """Return the names of all engines."""
    return tuple(_engines)


def engine_for(question: Question) -> str:
    """Return the name of the first engine whose scores answer a question."""
    for name, rules in _engines.items():
        if rules.question == question:
            return name
    raise PlanError(f"no engine answers the question {question!r}.")


def first_order_engine() -> str:
    """Return the name of an engine that takes first derivatives only."""
    return next(name for name, rules in _engines.items() if not rules.second_order)


@dataclass(frozen=True)
class Settings:
    """What a plan says about one checkpoint."""

    steps: Steps
    lr: float | Literal["auto"]
    damping: float
    weight: float

    @property
    def path(self) -> int:
        """How many steps a path has."""
        assert self.steps != "infinite"
        return self.steps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a simulation.

    `steps`, `lr`, `damping` and `weight` take one value for all checkpoints, or a tuple with one for each, run after
    run. Settings that not every engine uses name theirs; the path engines are "tangent" and "trajectories".

    engine: "tangent" computes the exact response along the path by forward-over-reverse differentiation. "trajectories"
        runs the perturbed descents themselves; it needs only first derivatives, so it works with any model. "spectral"
        computes the response in closed form from the curvature at the checkpoint, for thousands of sources. "replay"
        repeats a recorded run without each source: exact for that run.
    steps: the number of gradient steps; "spectral" also accepts "infinite".
    lr: the step size; "auto" uses 1/|μ|, where μ is the sharpest curvature along the path.
    damping: added to the curvature that responses see; the path itself stays that of plain training.
    weight: how much a checkpoint counts in the average; 0 skips it.
    curvature: what responses see: the "hessian", or the "gauss-newton" matrix, which leaves out the curvature of the
        model itself and so has no negative directions. "auto" is the Hessian for path engines, else Gauss–Newton.
    preconditioner: (path engines) "adam" divides each step by √v̂ + 1e-8, where v̂ are Adam's second moments at the
        checkpoint, recorded or else estimated from gradients.
    momentum: (path engines) the share β of the previous direction that a step keeps: d ← βd + (1 − β)∇, θ ← θ − lr·d.
        Stable steps are (1 + β)/(1 − β) times longer. `torch.optim.SGD(lr=a, momentum=β)` is lr = a/(1 − β) here.
    dropout: (path engines) draw the model's dropout in every step, as training does, the same for all sources.
    directions: ("spectral") how many directions of the curvature are resolved.
    form: ("spectral") "factored" stores the factors of per-example gradients (and groups in full); "dense" stores every
        value; "projected" stores only the part along the `directions`: the same few numbers per source for any model
        size, and queries that cost the same for any number of sources. The store records what a projection loses.
    batch_size: (path engines) the size of mini-batches, drawn with `seed` and shared by all sources; None takes all.
    source_sample: (path engines) how many members represent a source in each mini-batch step; None uses all of them.
    variant: ("trajectories") "two_sided", "one_sided", or the paper's "mirrored", which is valid only at an optimum and
        is refused elsewhere unless `accept_drift` is set.
    epsilon: ("trajectories") by how much a source is up- and down-weighted; "auto" takes the most self-consistent.
    keep_pair: ("trajectories") store both perturbed end points, for the `literal` readout.
    start: ("replay") repeat only the steps from this one on, for runs that are too long to repeat in full.
    stacked: ("replay") repeat the run for many sources at once where that is possible. False takes one source after
        another, which is slower and rounds just as training did, for runs in half precision.

    >>> Plan(steps=(100, 200), lr=0.1).at(1, 2)
    Settings(steps=200, lr=0.1, damping=0.0, weight=1.0)
    """

    engine: str = field(default_factory=lambda: _default[0])
    steps: Steps | tuple[Steps, ...] = 200
    lr: float | Literal["auto"] | tuple[float | Literal["auto"], ...] = "auto"
    damping: float | tuple[float, ...] = 0.0
    weight: float | tuple[float, ...] = 1.0
    curvature: Curvature | Literal["auto"] = "auto"
    preconditioner: Literal["adam"] | None = None
    momentum: float = 0.0
    dropout: bool = False
    directions: int = 300
    form: Form = "factored"
    batch_size: int | None = None
    source_sample: int | None = None
    seed: int = 0
    variant: Variant = "two_sided"
    epsilon: float | Literal["auto"] = 1.0
    accept_drift: bool = False
    keep_pair: bool = False
    start: int = 0
    stacked: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, _plain(value))
        assert self.rules  # an engine that is not there is refused
        _one_of("variant", self.variant, get_args(Variant))
        for name in ("dropout", "accept_drift", "keep_pair", "stacked"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for steps in _each(self.steps):
            endless = steps == "infinite" and self.rules.infinite
            _require(endless or (_whole(steps) and steps >= 1), "steps", steps, "a whole number of at least 1")
        for lr in _each(self.lr):
            _require(lr == "auto" or _number(lr, above=0), "lr", lr, 'a positive number or "auto"')
        for damping in _each(self.damping):
            _require(_number(damping), "damping", damping, "a number of at least 0")
        for weight in _each(self.weight):
            _require(_number(weight), "weight", weight, "a number of at least 0")
        _require(any(_each(self.weight)), "weight", self.weight, "positive for at least one checkpoint")
        for name in ("batch_size", "source_sample"):
            size = getattr(self, name)
            _require(size is None or (_whole(size) and size >= 1), name, size, "None or at least 1")
        _require(_whole(self.start) and self.start >= 0, "start", self.start, "a whole number of at least 0")
        _require(_whole(self.seed) and 0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2⁶³ − 1")
        _require(
            self.epsilon == "auto" or _number(self.epsilon, above=0),
            "epsilon",
            self.epsilon,
            'a positive number or "auto"',
        )
        if self.source_sample is not None and self.batch_size is None:
            raise PlanError("source_sample belongs to mini-batches: give batch_size too, or leave it out.")
        for name in sorted(set().union(*(rules.fields for rules in _engines.values())) - self.rules.fields):
            if getattr(self, name) != getattr(type(self), name):
                owners = " or ".join(f'engine="{each}"' for each, rules in _engines.items() if name in rules.fields)
                raise PlanError(f"{name} belongs to {owners}; the {self.engine} engine does not use it.")
        self._refuse_own_steps()
        _one_of("curvature", self.curvature, ("auto", *get_args(Curvature)))
        _require(self.preconditioner in (None, "adam"), "preconditioner", self.preconditioner, 'None or "adam"')
        _require(_number(self.momentum) and self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")
        _one_of("form", self.form, get_args(Form))
        _require(_whole(self.directions) and self.directions >= 1, "directions", self.directions, "at least 1")
        if self.keep_pair and self.variant != "two_sided":
            raise PlanError(
                f'keep_pair belongs to variant="two_sided": a {self.variant} imprint holds its pair already.'
            )
        if self.accept_drift and self.variant != "mirrored":
            raise PlanError('accept_drift belongs to variant="mirrored": the others are right with drift.')
        lengths = {name: len(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        if len(set(lengths.values())) > 1:
            raise PlanError(f"settings per checkpoint must be equally many, got {lengths}.")

    def _refuse_own_steps(self) -> None:
        """Refuse settings of a descent where the engine follows a recorded run."""
        for name in ("steps", "lr", "damping") if self.rules.question == "this_run" else ():
            if getattr(self, name) != getattr(type(self), name):
                raise PlanError(
                    f"{name} is not for the {self.engine} engine, which repeats the steps of a recorded run as they "
                    "were: leave it out."
                )

    @property
    def rules(self) -> EngineRules:
        """What its engine makes of the plan."""
        _one_of("engine", self.engine, engine_names())
        return _engines[self.engine]

    @property
    def seen_curvature(self) -> Curvature:
        """The curvature that responses see."""
        return self.rules.curvature if self.curvature == "auto" else self.curvature

    @property
    def perturbs(self) -> bool:
        """Whether sources are up- and down-weighted by an ε."""
        return self.rules.perturbs

    @property
    def holds_pair(self) -> bool:
        """Whether imprints hold both perturbed end points of every source."""
        return self.perturbs and (self.keep_pair or self.variant != "two_sided")

    def at(self, checkpoint: int, checkpoints: int) -> Settings:
        """Return the settings for checkpoint number `checkpoint` of `checkpoints`."""

        def pick(name: str) -> Any:
            value = getattr(self, name)
            if not isinstance(value, tuple):
                return value
            if len(value) != checkpoints:
                raise PlanError(f"{name} has {len(value)} values, but there are {checkpoints} checkpoints.")
            return value[checkpoint]

        return Settings(pick("steps"), pick("lr"), float(pick("damping")), float(pick("weight")))

    @classmethod
    def auto(
        cls,
        task: "Task",
        data: Any,
        sources: "Sources",
        checkpoints: Checkpoints | None = None,
        *,
        run: Any = None,
        batch_size: int | None = None,
        collate_fn: "Collate | None" = None,
        hash_data: "HashData" = "all",
        progress: "bool | Advance" = True,
    ) -> "Plan":
        """Choose a plan with settings for each checkpoint, from curvature and gradients there; see `simulation.auto`.

        The arguments are those of `simulate`. Sources of one example each get the spectral engine, groups the path
        of the tangent engine, with dropout if the model has some, and in Adam's metric if its second moments came with
        every checkpoint. A recorded run is repeated where that takes no more
        than a night and the run is calm; otherwise the plan is for the checkpoints of the run.
        """
        return _choosers[-1](task, data, sources, checkpoints, run, batch_size, collate_fn, hash_data, progress)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """Read a plan from a manifest, and raise an error on unknown fields."""
        known = {item.name for item in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise PlanError(f"a plan has no field {name!r}; it has {', '.join(sorted(known))}.")
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**fields)


def register_chooser(choose: Callable[..., Plan]) -> None:
    """Make `Plan.auto` ask this function; `simulation.auto` registers its own, and lies above this module."""
    _choosers.append(choose)


def _plain(value: Any) -> Any:
    """Turn lists into tuples, and numbers of numpy or torch into Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(_plain(item) for item in value) if isinstance(value, list | tuple) else value


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any, above: float | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return False
    return value >= 0 if above is None else value > above


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise PlanError(f"{name} must be {expected}, got {value!r}.")


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} {value!r} is unknown: use one of {', '.join(known)}.")


def format_plan(plan: Plan) -> str:
    """Format what a plan says of engine and checkpoints.

    >>> format_plan(Plan(engine="spectral", steps="infinite", damping=(0.1, 0.02)))
    'spectral, Gauss–Newton; steps infinite; lr auto; damping 0.1, 0.02; weight 1'
    >>> format_plan(Plan(steps=9, lr=0.1, preconditioner="adam", momentum=0.9, batch_size=64))
    'tangent; steps 9; lr 0.1; damping 0; weight 1; preconditioner adam; momentum 0.9; batch size 64'
    """
    if plan.rules.question == "this_run":
        return f"{plan.engine} of the recorded run" + (f" from step {plan.start} on" if plan.start else "")
    head = [plan.engine] + (["Gauss–Newton"] if plan.seen_curvature == "gauss-newton" else [])
    parts = [", ".join(head + (["dropout"] if plan.dropout else []))]
    for name in ("steps", "lr", "damping", "weight"):
        values = getattr(plan, name)
        every = values if isinstance(values, tuple) else (values,)
        parts.append(f"{name} {', '.join(f'{v:.4g}' if isinstance(v, float) else str(v) for v in every)}")
    for name in ("preconditioner", "momentum", "batch_size", "source_sample"):
        if value := getattr(plan, name):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return "; ".join(parts)
