"""The settings of a simulation: validated when made, and written into the store they produce."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from imprint.errors import PlanError

Engine = Literal["tangent", "trajectories"]
Variant = Literal["two_sided", "mirrored", "one_sided"]


@dataclass(frozen=True)
class Settings:
    """What a plan says about one checkpoint."""

    steps: int
    lr: float | Literal["auto"]
    damping: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How imprints are simulated.

    `steps`, `lr`, `damping` and `weight` are one value for all checkpoints, or a tuple with one for each.

    engine: "tangent", the exact response along the path (forward-over-reverse); or "trajectories", the perturbed
        descents themselves, which need first derivatives only and so run on any model.
    steps, lr: T and η of the simulated gradient descent; "auto" takes 1/|μ| of the sharpest
        curvature met along the path.
    damping: λ, on the response only; the path itself stays that of plain training.
    weight: of a checkpoint in the mean over checkpoints; 0 skips it.
    batch_size: None for the full batch, else mini-batches drawn with `seed` and shared by all sources.
    source_sample: with mini-batches, how many of a source's members stand for it in each step (None: all).
    variant: of "trajectories": "two_sided", "one_sided", or the paper's "mirrored", which holds at an optimum only
        and refuses elsewhere unless `accept_drift`.
    epsilon: of "trajectories": by how much a source is up- and down-weighted; "auto" chooses by self-agreement.
    keep_pair: of "trajectories": keep both perturbed end points, for the `literal` readout.

    >>> Plan(steps=(100, 200), lr=0.1).at(1, 2)
    Settings(steps=200, lr=0.1, damping=0.0, weight=1.0)
    """

    engine: Engine = "tangent"
    steps: int | tuple[int, ...] = 200
    lr: float | Literal["auto"] | tuple[float | Literal["auto"], ...] = "auto"
    damping: float | tuple[float, ...] = 0.0
    weight: float | tuple[float, ...] = 1.0
    batch_size: int | None = None
    source_sample: int | None = None
    seed: int = 0
    variant: Variant = "two_sided"
    epsilon: float | Literal["auto"] = 1.0
    accept_drift: bool = False
    keep_pair: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, _plain(value))
        _one_of("engine", self.engine, get_args(Engine))
        _one_of("variant", self.variant, get_args(Variant))
        for steps in _each(self.steps):
            _require(_whole(steps) and steps >= 1, "steps", steps, "a whole number of at least 1")
        for lr in _each(self.lr):
            _require(lr == "auto" or _number(lr, above=0), "lr", lr, 'a positive number or "auto"')
        for damping in _each(self.damping):
            _require(_number(damping), "damping", damping, "a number of at least 0")
        for weight in _each(self.weight):
            _require(_number(weight), "weight", weight, "a number of at least 0")
        _require(any(_each(self.weight)), "weight", self.weight, "positive for at least one checkpoint")
        for field in ("batch_size", "source_sample"):
            size = getattr(self, field)
            _require(size is None or (_whole(size) and size >= 1), field, size, "None or at least 1")
        _require(_whole(self.seed) and 0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2⁶³ − 1")
        _require(
            self.epsilon == "auto" or _number(self.epsilon, above=0),
            "epsilon",
            self.epsilon,
            'a positive number or "auto"',
        )
        if self.source_sample is not None and self.batch_size is None:
            raise PlanError("source_sample belongs to mini-batches: give batch_size too, or leave it out.")
        if self.engine == "tangent":
            for field in ("variant", "epsilon", "accept_drift", "keep_pair"):
                if getattr(self, field) != getattr(type(self), field):
                    raise PlanError(f'{field} belongs to engine="trajectories"; the tangent engine has no such thing.')
        if self.keep_pair and self.variant != "two_sided":
            raise PlanError(
                f'keep_pair belongs to variant="two_sided": a {self.variant} imprint holds its pair already.'
            )
        if self.accept_drift and self.variant != "mirrored":
            raise PlanError('accept_drift belongs to variant="mirrored": the others are right with drift.')
        lengths = {name: len(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        if len(set(lengths.values())) > 1:
            raise PlanError(f"settings per checkpoint must be equally many, got {lengths}.")

    def at(self, checkpoint: int, checkpoints: int) -> Settings:
        """The settings for checkpoint number `checkpoint` of `checkpoints`."""

        def pick(name: str) -> Any:
            value = getattr(self, name)
            if not isinstance(value, tuple):
                return value
            if len(value) != checkpoints:
                raise PlanError(f"{name} has {len(value)} values, but there are {checkpoints} checkpoints.")
            return value[checkpoint]

        return Settings(pick("steps"), pick("lr"), float(pick("damping")), float(pick("weight")))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """The plan a manifest describes; unknown fields are errors."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise PlanError(f"a plan has no field {name!r}; it has {', '.join(sorted(known))}.")
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**fields)


def _plain(value: Any) -> Any:
    """Lists as tuples, and numbers of numpy or torch as Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(_plain(item) for item in value) if isinstance(value, list | tuple) else value


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any, above: float | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= 0 if above is None else value > above


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise PlanError(f"{name} must be {expected}, got {value!r}.")


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} {value!r} is unknown: use one of {', '.join(known)}.")
