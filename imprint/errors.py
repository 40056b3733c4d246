"""Defines the errors a caller may want to catch. Messages say what was given, what was expected and what to do."""

from collections.abc import Mapping

from imprint.display import for_terminal


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else '(no message)'}"


class ImprintError(Exception):
    """Any error that this library raises on purpose. Its message is safe to print, whatever names it quotes."""

    def __str__(self) -> str:
        return "\n".join(map(for_terminal, super().__str__().split("\n")))


class ReliabilityWarning(UserWarning):
    """Says that a result may be wrong or less certain than it looks, and what to do about it."""


class TaskError(ImprintError, ValueError):
    """The model, its loss, its measurement or its parameters cannot be used as given."""


class SourcesError(ImprintError, ValueError):
    """The sources do not describe the training data."""


class DataError(ImprintError, ValueError):
    """A dataset or a set of queries cannot be read as batches."""


class PlanError(ImprintError, ValueError):
    """A setting is out of range, or conflicts with another one."""


class SimulationError(ImprintError, RuntimeError):
    """A simulation produced numbers that cannot be trusted."""


class DivergenceError(SimulationError):
    """A simulated path or a response diverges: the step is too long for the curvature, or there are too many."""


class StoreError(ImprintError, RuntimeError):
    """A store cannot be written, or its contents cannot be trusted."""


class PartsError(ImprintError, RuntimeError):
    """Some parts of a simulation or of a ground truth could not be made.

    tracebacks: where each of them went wrong, by part, such as "3/8".
    """

    tracebacks: Mapping[str, str] = {}


class ReadoutError(ImprintError, RuntimeError):
    """A readout cannot be computed as requested for this task and store."""


class UndefinedScore(ReadoutError):
    """The measurement of a query, or a score of it, is no finite number."""


class TooLarge(ReadoutError):
    """Reading a query takes more memory than a readout may use."""


class ConcurrencyError(ImprintError, RuntimeError):
    """Another thread of the process interfered with a computation."""


class ConfigurationError(ImprintError, ValueError):
    """Something that the command line or a configuration file names cannot be found or used."""


class CreditError(ImprintError, RuntimeError):
    """A query cannot be credited as asked, or a ledger cannot be trusted."""


class DamagedLog(CreditError):
    """What a ledger holds is not what was written to it."""


class CreditUnavailable(CreditError):
    """The database of a ledger cannot be read or written."""


class ConflictError(CreditError):
    """A key was used before, for another request."""


class AccessError(ImprintError, RuntimeError):
    """The keys of a service cannot be read or written."""


class ServiceError(ImprintError, RuntimeError):
    """A service refused a request, or cannot be reached.

    status: the HTTP status; None if there was no answer.
    code: the service's word for the reason, such as "too_late"; None if there was no answer.
    idempotency_key: of a request that may have been credited: ask again with it, and nothing is credited twice.
    """

    def __init__(
        self, message: str, *, status: int | None = None, code: str | None = None, idempotency_key: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.idempotency_key = status, code, idempotency_key


class MissingExtra(ImprintError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f'{feature} needs an optional dependency: pip install "imprint-attribution[{extra}]"')
