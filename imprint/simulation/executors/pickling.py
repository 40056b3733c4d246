"""Turns what parts are made from into bytes for other processes, user code with lambdas included."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from imprint.errors import DataError, first_line

_DEEPEST = 5


def to_bytes(make: Any, given: Mapping[str, Any], cloudpickle: Any) -> bytes:
    """Pickle a function and its arguments; name what cannot be pickled.

    cloudpickle: the module that pickles; it brings functions along that no other process could import.
    """
    with _own_modules(cloudpickle):
        try:
            return bytes(cloudpickle.dumps((make, dict(given))))
        except Exception as error:
            for name, value in given.items():
                if (found := _find_culprit(name, value, cloudpickle)) is not None:
                    place, culprit, reason = found
                    raise DataError(
                        f"{place} cannot be sent to other processes, as it holds a {type(culprit).__name__} "
                        f"({first_line(reason)}): create it on first use, or leave it out."
                    ) from error
            raise


@contextmanager
def _own_modules(cloudpickle: Any) -> Iterator[None]:
    """Send along the code of modules that were loaded from a file of another name, as the command line does."""
    modules = [module for module in list(sys.modules.values()) if _has_other_name(module)]
    try:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _has_other_name(module: Any) -> bool:
    """Tell whether no other process finds a module by its name, for its file has another one."""
    spec = getattr(module, "__spec__", None)
    if not isinstance(module, ModuleType) or spec is None or spec.name != module.__name__ or "." in spec.name:
        return False
    file = Path(spec.origin) if isinstance(spec.origin, str) else None
    return file is not None and file.suffix == ".py" and file.stem not in (spec.name, "__init__")


def _find_culprit(
    place: str, value: Any, cloudpickle: Any, deepest: int = _DEEPEST
) -> tuple[str, Any, Exception] | None:
    """Find what within a value cannot be pickled: where it is, itself, and why; None if the value can be."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        for name, inner in _look_inside(value) if deepest else ():
            if (found := _find_culprit(f"{place}{name}", inner, cloudpickle, deepest - 1)) is not None:
                return found
        return place, value, error
    return None


def _look_inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value refers to, with words for where that is."""
    if isinstance(value, FunctionType):
        names = inspect.getclosurevars(value)
        for name, inner in {**names.nonlocals, **names.globals}.items():
            yield f", which uses {name}", inner
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", inner) for name, inner in vars(value).items())
