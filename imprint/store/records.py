"""Dataclasses as JSON: the types of the fields say what a file may hold there.

`read(File, value)` looks at each field of a JSON object by its annotation and refuses, by its place, what is not of
that type. A method of `Value` in an annotation narrows it: `Annotated[float, Value.positive]`.
"""

from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from imprint.store.values import Value, is_number

Record = TypeVar("Record")
Positive = Annotated[float, Value.positive]
NotNegative = Annotated[float, Value.at_least_zero]
Count = Annotated[int, lambda value: value.whole(1)]
Checksum = Annotated[str, Value.checksum]
_READERS: dict[Any, Callable[[Value], Any]] = {
    bool: Value.flag,
    int: Value.whole,
    float: Value.number,
    str: Value.text,
    Any: lambda value: value.content,
}


def read(kind: type[Record], value: Value) -> Record:
    """Read a dataclass from a JSON object that has exactly its fields."""
    hints = _read_hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _read(hints[name], item) for name, item in value.record(*hints).items()})


@cache
def _read_hints(kind: Hashable) -> dict[str, Any]:
    """Return the annotations of a dataclass; they take long to look up, and a store may have many records."""
    return get_type_hints(kind, include_extras=True)


def _read(hint: Any, value: Value) -> Any:
    """Read one value by the type it must have."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return inner[1](value)
    if origin in (Union, UnionType):
        return _read_one_of(inner, value)
    if origin is Literal:
        if value.content not in inner or isinstance(value.content, bool):
            value.refuse(" or ".join(map(repr, inner)))
        return value.content
    if origin is dict:
        return {name: _read(inner[1], item) for name, item in value.mapping().items()}
    if origin in (tuple, list):
        items = value.items()
        if origin is tuple and inner[-1] is not Ellipsis and len(items) != len(inner):
            value.refuse(f"{len(inner)} values")
        return origin(_read(inner[0], item) for item in items)
    if is_dataclass(hint):
        return hint.from_json(value) if hasattr(hint, "from_json") else read(hint, value)  # type: ignore[arg-type]
    return _READERS[hint](value)


def _read_one_of(hints: tuple[Any, ...], value: Value) -> Any:
    """Read a value of one of several types: nothing, one of some texts, or else the type that remains."""
    if value.content is None and NoneType in hints:
        return None
    for hint in hints:
        if get_origin(hint) is Literal and not is_number(value.content) and value.content in get_args(hint):
            return value.content
    remaining = [hint for hint in hints if hint is not NoneType and get_origin(hint) is not Literal]
    if not remaining:
        value.refuse(" or ".join(repr(name) for hint in hints for name in get_args(hint)))
    return _read(remaining[0], value)
