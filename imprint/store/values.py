"""Values from JSON files that may hold anything: each is looked at before it is used, and refused by its place.

A file may be damaged, cut short, or written by hand. Whatever is in it, the outcome is a value of the expected kind or
a `StoreError` of one line. `imprint.store.manifest` reads the files of a store through this.
"""

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from imprint.errors import StoreError
from imprint.store.files import refuse_unreadable

_DEEPEST = 64  # levels of nesting: far more than anything here has, far less than what ends in a RecursionError
_LONGEST = 1 << 30  # bytes of a file: a table of some 30 million sources has as many, a manifest far fewer
_LARGEST = 2**63 - 1  # what fits the integers of tensors, and still divides a float


@dataclass(frozen=True)
class Value:
    """A JSON value, with the file and the field it stands in."""

    content: Any
    file: Path
    field: str = ""

    def fail(self, reason: str) -> NoReturn:
        raise StoreError(f"{self.file} cannot be read: {reason}.")

    def refuse(self, expected: str) -> NoReturn:
        self.fail(f"{self.field or 'its content'} must be {expected}, got {shown(self.content)}")

    def text(self) -> str:
        text: str = self._checked(isinstance(self.content, str), "a text")
        return text

    def flag(self) -> bool:
        flag: bool = self._checked(isinstance(self.content, bool), "true or false")
        return flag

    def whole(self, least: int = 0) -> int:
        number: int = self._checked(_is_whole(self.content, least), f"a whole number of at least {least}")
        return number

    def number(self) -> float:
        return float(self._checked(is_number(self.content), "a number"))

    def positive(self) -> float:
        return float(self._checked(is_number(self.content) and self.content > 0, "a positive number"))

    def at_least_zero(self) -> float:
        return float(self._checked(is_number(self.content) and self.content >= 0, "a number of at least 0"))

    def checksum(self) -> str:
        holds = isinstance(self.content, str) and re.fullmatch("[0-9a-f]{64}", self.content) is not None
        checksum: str = self._checked(holds, "a SHA-256 of 64 hexadecimal digits")
        return checksum

    def items(self) -> "list[Value]":
        content = self._checked(isinstance(self.content, list), "a list")
        return [Value(item, self.file, f"{self.field}[{index}]") for index, item in enumerate(content)]

    def mapping(self) -> "dict[str, Value]":
        """Return the values of an object with any keys."""
        content = self._checked(isinstance(self.content, dict), "an object")
        return {key: Value(item, self.file, self._inner(key)) for key, item in content.items()}

    def record(self, *names: str) -> "dict[str, Value]":
        """Return the values of an object with exactly these keys."""
        content = self._checked(isinstance(self.content, dict), "an object")
        within = f"{self.field}." if self.field else ""
        if missing := [name for name in names if name not in content]:
            self.fail(f"{within}{missing[0]} is missing")
        if unknown := [name for name in content if name not in names]:
            self.fail(f"it has an unknown field {shown(unknown[0])}{f' in {self.field}' if self.field else ''}")
        return {name: Value(content[name], self.file, f"{within}{name}") for name in names}

    def _inner(self, key: str) -> str:
        return f"{self.field}[{shown(key)}]" if self.field else clipped(key, 60)  # every value inside repeats it

    def texts(self) -> tuple[str, ...]:
        return self._every(lambda item: isinstance(item, str), "a text")

    def wholes(self, least: int = 0) -> tuple[int, ...]:
        return self._every(lambda item: _is_whole(item, least), f"a whole number of at least {least}")

    def numbers(self) -> tuple[float, ...]:
        return tuple(map(float, self._every(is_number, "a number")))

    def _every(self, holds: Callable[[Any], bool], expected: str) -> tuple[Any, ...]:
        content = self._checked(isinstance(self.content, list), "a list")
        for index, item in enumerate(content):
            if not holds(item):
                Value(item, self.file, f"{self.field}[{index}]").refuse(expected)
        return tuple(content)

    def _checked(self, holds: bool, expected: str) -> Any:
        return self.content if holds else self.refuse(expected)

    def unsealed(self) -> "Value":
        """Return the object that was sealed, without its seal; refuse one that was changed since."""
        content = dict(self._checked(isinstance(self.content, dict), "an object"))
        seal = Value(content.pop("sha256", None), self.file, "sha256").checksum()
        if _checksum(content) != seal:
            raise StoreError(f"{self.file} was changed after it was written: its checksum differs.")
        return Value(content, self.file, self.field)


class OtherVersionError(StoreError):
    """A file was written by another version, and is not damaged."""


@contextlib.contextmanager
def advised(advice: str) -> Iterator[None]:
    """Add to the error of a file that cannot be read what to do about it."""
    try:
        yield
    except OtherVersionError:
        raise
    except StoreError as error:
        raise StoreError(f"{error} {advice}") from error


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Add to an object a checksum of everything in it, as it will be read again."""
    plain: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))  # keys that are numbers become texts
    return {**plain, "sha256": _checksum(plain)}


def _checksum(values: dict[str, Any]) -> str:
    """Return the SHA-256 of the JSON with sorted keys, without spaces and with everything beyond ASCII escaped."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path, longest: int = _LONGEST) -> Value:
    """Read a JSON file of bounded size, depth and numbers, with texts that can be written again."""
    return read_hashed(path, longest)[0]


def read_hashed(path: Path, longest: int = _LONGEST) -> tuple[Value, str]:
    """Read a JSON file as `read_json` does; return it with the checksum of the very bytes that were read."""
    try:
        refuse_unreadable(path, longest)
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
    return parsed(content, path), hashlib.sha256(content).hexdigest()


def parsed(text: bytes, path: Path) -> Value:
    """Read JSON from a text in the same way; `path` is where it stands."""
    try:
        content = json.loads(
            text.decode(),
            object_pairs_hook=_without_twins,
            parse_constant=_refuse_constant,
            parse_float=_bounded_float,
            parse_int=_bounded_int,
        )
        json.dumps(content, ensure_ascii=False).encode()  # fails where an escape is half of a character
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    _refuse_depth(content, path)
    return Value(content, path)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; refuse two values of one name, since readers disagree on which of them counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {shown(twice)} appears more than once in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _bounded_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > 20:  # 2⁶⁴, the range of seeds, has 20 digits
        raise ValueError(f"the number {shown(text)} is too large")
    return int(text)


def _refuse_depth(content: Any, path: Path) -> None:
    level = [content]
    for _ in range(_DEEPEST):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return
    raise StoreError(f"{path} cannot be read: it is nested more than {_DEEPEST} levels deep.")


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether a value of JSON is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def shown(value: Any) -> str:
    """Format a value on one line of bounded length."""
    return clipped(repr(value), 60)


def clipped(text: str, longest: int) -> str:
    """Shorten a text that is too long, with an ellipsis at its end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
