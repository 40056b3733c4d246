"""The errors a caller may want to catch. Their messages say what was given, what was expected and what to do."""

from imprint.display import for_terminal


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else '(no message)'}"


class ImprintError(Exception):
    """Any error this library raises on purpose. Its message has names and paths in it, and moves no cursor."""

    def __str__(self) -> str:
        return "\n".join(map(for_terminal, super().__str__().split("\n")))


class ReliabilityWarning(UserWarning):
    """A result may be wrong or less certain than it looks; the message names the remedy."""


class TaskError(ImprintError, ValueError):
    """The model, its loss, its measurement or its parameters cannot be used as given."""


class SourcesError(ImprintError, ValueError):
    """The sources do not describe the training data."""


class DataError(ImprintError, ValueError):
    """A dataset or a set of queries cannot be read as batches."""


class PlanError(ImprintError, ValueError):
    """A setting of a simulation is out of its range, or does not fit the others."""


class SimulationError(ImprintError, RuntimeError):
    """A simulation produced numbers that cannot be trusted."""


class DivergenceError(SimulationError):
    """A simulated path or a response diverges: the step is too long for the curvature, or there are too many."""


class StoreError(ImprintError, RuntimeError):
    """A store cannot be written, or what it holds cannot be trusted."""


class ReadoutError(ImprintError, RuntimeError):
    """A readout cannot be done as asked on this task and store."""


class ConcurrencyError(ImprintError, RuntimeError):
    """Another thread of the process got in the way of a computation."""


class ConfigurationError(ImprintError, ValueError):
    """What the command line or a configuration file names cannot be found or used."""


class MissingExtra(ImprintError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f'{feature} needs an optional dependency: pip install "imprint-attribution[{extra}]"')
