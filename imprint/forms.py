"""How JSON becomes a query of a task: what a service needs to know beside the task itself.

A task that is served has a form: `Task(..., form=...)`. `PictureForm` and `NumbersForm` are for classifiers of arrays;
language tasks with a tokenizer have a form of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from imprint.batches import Batch, concatenate
from imprint.errors import ConfigurationError, DataError, ImprintError, first_line

Kind = Literal["picture", "numbers", "completion"]
Ask = Callable[[Tensor], Any]
_LARGEST = 1e30
_UNKNOWN = -1  # the label of a query for which the model's own answer stands in


@runtime_checkable
class Form(Protocol):
    """How JSON becomes a query of a task, and what a person is shown of it."""

    @property
    def kind(self) -> Kind:
        """What a query is to a person, by which pages choose how to show it."""
        ...

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of one query."""
        ...

    @property
    def example(self) -> Any:
        """A valid query, in JSON values."""
        ...

    def read(self, query: Any) -> Batch:
        """Return a query as a batch of one; refuse what is none with a `DataError` for whoever sent it."""
        ...

    def warnings(self, query: Any) -> tuple[str, ...]:
        """Return what whoever sent a query should know before believing its attribution; it was read before."""
        ...

    def join(self, batches: Sequence[Batch]) -> Batch:
        """Return batches of one as one batch."""
        ...

    def fill(self, ask: Ask, batch: Batch) -> Batch:
        """Return a batch with what its queries left open, such as labels that the model is asked for.

        ask: calls the model that is served, without gradients.
        """
        ...

    def answer(self, batch: Batch, row: int) -> str:
        """Return the answer that is attributed, for a person."""
        ...


@dataclass(frozen=True)
class NumbersForm:
    """Queries of a classifier of arrays: `{"pixels": [...], "label": 3}`.

    shape: of one input. The JSON has its numbers in a flat list.
    classes: the names of the classes, or how many there are.
    mean, scale: inputs are standardised as (number − mean) / scale.
    field: what the list is called in JSON.
    low, high: what the numbers are between, if anything.
    flat: whether the model takes an input as one row of numbers, whatever its shape.
    dtype: of inputs; a service takes that of the model.

    Without a label, the class that the model finds likeliest is attributed.

    >>> form = NumbersForm((2,), classes=3)
    >>> form.read({"values": [0.5, 1], "label": 2})
    (tensor([[0.5000, 1.0000]]), tensor([2]))
    """

    shape: tuple[int, ...]
    classes: int | tuple[str, ...]
    mean: float = 0.0
    scale: float = 1.0
    field: str = "values"
    low: float | None = None
    high: float | None = None
    flat: bool = False
    kind: Kind = "numbers"
    dtype: torch.dtype = torch.float32

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes

    @property
    def size(self) -> int:
        """How many numbers an input has."""
        return math.prod(self.shape)

    @property
    def _input_shape(self) -> tuple[int, ...]:
        return (self.size,) if self.flat else self.shape

    @property
    def schema(self) -> dict[str, Any]:
        limits = {} if self.low is None else {"minimum": self.low}
        limits |= {} if self.high is None else {"maximum": self.high}
        numbers = {"type": "array", "items": {"type": "number", **limits}, "minItems": self.size, "maxItems": self.size}
        label = {"type": ["integer", "null"], "minimum": 0, "maximum": len(self.names) - 1}
        return {
            "type": "object",
            "properties": {self.field: numbers, "label": label},
            "required": [self.field],
            "additionalProperties": False,
        }

    @property
    def example(self) -> Any:
        return {self.field: [0.0 if self.low is None else self.low] * self.size}

    def read(self, query: Any) -> Batch:
        if not isinstance(query, dict) or not query.keys() <= {self.field, "label"} or self.field not in query:
            raise DataError(f'a query is an object with "{self.field}" and, if you like, "label".')
        given, label = query[self.field], query.get("label")
        if not isinstance(given, list) or len(given) != self.size:
            got = f"; this one has {len(given)}" if isinstance(given, list) else ""
            raise DataError(f'"{self.field}" is a list of {self.size} numbers{got}.')
        self._check_numbers(given)
        if label is not None and (isinstance(label, bool) or not isinstance(label, int)):
            raise DataError('"label" is the number of a class.')
        if label is not None and not 0 <= label < len(self.names):
            raise DataError(f'"label" is a class from 0 to {len(self.names) - 1}.')
        values = (torch.tensor(given, dtype=torch.float64) - self.mean) / self.scale
        inputs = values.to(self.dtype).reshape(1, *self._input_shape)
        if not bool(inputs.isfinite().all()):
            place = int((~inputs.flatten().isfinite()).nonzero()[0])
            raise DataError(f'the number in place {place + 1} of "{self.field}" is too large for the model.')
        return inputs, torch.tensor([_UNKNOWN if label is None else label])

    def warnings(self, query: Any) -> tuple[str, ...]:
        return ()

    def _check_numbers(self, given: list[Any]) -> None:
        """Refuse what is no number that the model can take, by its place."""
        for place, value in enumerate(given, 1):
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise DataError(f'what is in place {place} of "{self.field}" is not a number.')
            if abs(value) > _LARGEST:
                raise DataError(f'the number in place {place} of "{self.field}" is too large: beyond {_LARGEST:g}.')
            if self.low is not None and value < self.low:
                raise DataError(f'the number in place {place} of "{self.field}" is below {self.low:g}.')
            if self.high is not None and value > self.high:
                raise DataError(f'the number in place {place} of "{self.field}" is above {self.high:g}.')

    def check(self, ask: Ask) -> None:
        """Refuse a model that cannot take an input of this form, or has not one output for each class."""
        shape = (1, *self._input_shape)
        try:
            outputs = ask(torch.zeros(shape, dtype=self.dtype))
        except ImprintError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the form does not fit the model, which fails on an input of shape {shape} and type {self.dtype}: "
                f"{first_line(error)}."
            ) from error
        wanted = (1, len(self.names))
        if not isinstance(outputs, Tensor):
            raise ConfigurationError(
                f"the form needs a model that returns a tensor of shape {wanted} for one input, and nothing else; this "
                f"one returns a {type(outputs).__name__}."
            )
        if tuple(outputs.shape) != wanted:
            raise ConfigurationError(
                f"the form has {len(self.names)} classes, so the model must return a tensor of shape {wanted} for one "
                f"input; it returns {tuple(outputs.shape)}."
            )

    def join(self, batches: Sequence[Batch]) -> Batch:
        return concatenate(list(batches))

    def fill(self, ask: Ask, batch: Batch) -> Batch:
        inputs, labels = batch
        if bool((labels != _UNKNOWN).all()):
            return batch
        logits: Tensor = ask(inputs)
        return inputs, torch.where(labels == _UNKNOWN, logits.argmax(1).cpu(), labels)

    def answer(self, batch: Batch, row: int) -> str:
        return self.names[int(batch[1][row])]


@dataclass(frozen=True)
class PictureForm(NumbersForm):
    """Queries of a classifier of grey pictures: `{"pixels": [...], "label": 3}`, row by row from the top left."""

    field: str = "pixels"
    kind: Kind = "picture"
