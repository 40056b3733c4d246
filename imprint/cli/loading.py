"""Loads what import strings name: `path/to/file.py:name`, `package.module:name`, or the name of a built-in setting.

A string without a colon names something in the task's own module. What is not named at all is looked up there by
convention: `data`, `sources`, `queries`, `checkpoints`, `plan`, `collate_fn`; and for reports `query_pictures`,
`query_texts`, `query_labels`, `example_texts`. Functions are called for what they return.
"""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from imprint.benchmarking.settings.catalogue import SETTINGS, BuiltIn, load_setting
from imprint.cli.describing import read_descriptions
from imprint.cli.experiment import PER_EXAMPLE, Experiment, is_checkpoint, split_run
from imprint.data import Data, as_tensors, is_columns, length_of
from imprint.display import suggest_names
from imprint.errors import ConfigurationError, ImprintError, PlanError, first_line
from imprint.evaluation.reports.illustrations import Illustrations
from imprint.plan import Plan, engine_for
from imprint.runtime.threads import set_threads
from imprint.simulation.recorded import open_run, settle_states
from imprint.sources import Sources
from imprint.store.addresses import is_address
from imprint.store.parts import PartsFolder, Share
from imprint.store.request import DTYPES
from imprint.store.shared_plan import agree_on_plan, find_plan
from imprint.task import Task

_SOURCES_WANTED = "the sources (or per-example)"
_TYPE_NAMES = {"task": "an imprint.Task", "sources": "an imprint.Sources", "plan": "an imprint.Plan"}


class Objects:
    """The objects that an experiment names, loaded on first use.

    share: the part that is simulated; all of them have the same automatic plan.
    """

    def __init__(self, experiment: Experiment, share: Share | None = None) -> None:
        self.experiment, self._share = experiment, share
        if experiment.task is None:
            raise ConfigurationError(
                "no task is named: give an import string such as my_model.py:task, or a built-in setting "
                f"({', '.join(SETTINGS)})."
            )
        setting = experiment.task in SETTINGS
        device = experiment.device or "cpu"
        self._module: Any = load_setting(experiment.task, device) if setting else _load_module(experiment.task)
        self._place = experiment.task.rpartition(":")[0] or experiment.task

    @cached_property
    def task(self) -> Task:
        task = self._module.task if isinstance(self._module, BuiltIn) else self._load("task")
        if not isinstance(task, Task):
            raise ConfigurationError(f"{self.experiment.task} is a {type(task).__name__}, not an imprint.Task.")
        if self.experiment.device is not None:
            try:
                task.model.to(self.experiment.device)
            except (RuntimeError, AssertionError) as error:  # torch asserts where it is built without CUDA
                raise ConfigurationError(
                    f"the model cannot be moved to {self.experiment.device!r}: {first_line(error)}."
                ) from error
        set_threads(task.model)
        return task

    @cached_property
    def data(self) -> Any:
        return self._require("data", "the training data")

    def find(self, what: str, string: str) -> Any:
        """Load any object by its import string, without calling it."""
        return self._find(what, string, call=False)

    def find_optional(self, name: str) -> Any:
        """Return an object of the task's module without calling it; None if there is none of that name."""
        return self._find_by_convention(name, call=False)

    def call_optional(self, name: str) -> Any:
        """Return an object of the task's module, or what a function of that name returns; None if there is none."""
        return self._find_by_convention(name)

    @property
    def module(self) -> str:
        """The module of the task, as import strings name it."""
        return self._place

    @cached_property
    def queries(self) -> Any:
        return self._require("queries", "the queries")

    @cached_property
    def sources(self) -> Sources:
        each = self.experiment.sources == PER_EXAMPLE
        sources = Sources.per_example(length_of(self.data)) if each else self._require("sources", _SOURCES_WANTED)
        if not isinstance(sources, Sources):
            raise ConfigurationError(
                f"{self.experiment.sources or 'sources'} is a {type(sources).__name__}, not an imprint.Sources: "
                "Sources.by_label takes one label for each training example."
            )
        return sources.describe(read_descriptions(self.experiment.about)) if self.experiment.about else sources

    @property
    def collate_fn(self) -> Any:
        return self._load("collate_fn", call=False)

    @property
    def query_collate_fn(self) -> Any:
        """The collate function for the queries, which columns of tensors do not need."""
        return self._collate_for(self.queries)

    @property
    def examples_collate_fn(self) -> Any:
        """The collate function for the training data, which columns of tensors do not need."""
        return self._collate_for(self.data)

    @cached_property
    def examples(self) -> Data:
        """The training data as batches on the device of the task's model."""
        return Data(self.data, device=self.task.device, collate_fn=self.examples_collate_fn)

    def _collate_for(self, dataset: Any) -> Any:
        """Return the collate function unless the dataset is columns of tensors, or a loader with its own."""
        return None if is_columns(as_tensors(dataset)) or isinstance(dataset, DataLoader) else self.collate_fn

    @cached_property
    def run(self) -> Any:
        """The recorded run, if one is named: by its folder or by an import string."""
        named = self.experiment.run
        if named is None:
            return None
        _ = self.task  # first: the function that returns the task may train and record it
        is_string = ":" in named and not is_address(named) and not Path(named).exists()
        return open_run(self._find("run", named) if is_string else named)

    @cached_property
    def checkpoints(self) -> Any:
        _ = self.task  # first: the function that returns the task may train it, and fill the list of checkpoints
        named = self.experiment.checkpoints
        if not named:
            return None if self.run is not None else self._find_by_convention("checkpoints")
        if any(map(split_run, named)):
            return [list(split_run(each) or (each,)) for each in named]
        if len(named) > 1 or is_checkpoint(named[0]):
            return list(named)
        return self._find("checkpoints", named[0])

    @cached_property
    def plan(self) -> Plan:
        """The plan in the task's module, if there is one, overridden by the given fields."""
        base = self._find_by_convention("plan")
        if base is not None and not isinstance(base, Plan):
            raise ConfigurationError(f"plan in {self._place} is a {type(base).__name__}, not an imprint.Plan.")
        given = dict(self.experiment.plan)
        if self.run is not None and (base is None or base.rules.question != "this_run"):
            base = Plan(engine=engine_for("this_run"))  # the plan beside the task is for its checkpoints
        chosen: list[str] = []
        if given.pop("auto", False):
            options = {"collate_fn": self.collate_fn, **self._given("batch_size", "hash_data")}
            known = (self.task, self.data, self.sources, self.checkpoints)
            base = self._agree(partial(Plan.auto, *known, run=self.run, **options))
            default = vars(Plan())
            chosen = [name for name, value in vars(base).items() if value != default[name] and name not in given]
        try:
            return Plan.from_json({**(base or Plan()).to_json(), **given})
        except PlanError as error:
            if not chosen:
                raise
            raise PlanError(f"{error} (Chosen by auto: {', '.join(chosen)}.)") from error

    def _agree(self, choose: Callable[[], Plan]) -> Plan:
        """Choose a plan, or take over the one that another part has chosen."""
        folder = None if self.experiment.out is None else PartsFolder(self.experiment.out)
        if folder is None or (self._share is None and not folder.path.is_dir()):
            return choose()
        if self._share is None:  # parts that are made elsewhere
            return find_plan(folder, self.task, self.sources) or choose()
        return agree_on_plan(folder, self._share, self.task, self.sources, choose)

    @property
    def training(self) -> dict[str, Any]:
        """What `check` compares a simulation with: how models are retrained, and the run, repeated or not."""
        train = self._find_by_convention("train", call=False)
        known = {"train": train if callable(train) else None, "run": self.run}
        return {**known, **self._given("training_steps", "training_batch")}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that `simulate` and `check` share."""
        experiment = self.experiment
        if experiment.dtype is not None and experiment.dtype not in DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {experiment.dtype!r}.")
        given: dict[str, Any] = {
            "collate_fn": self.collate_fn,
            "memory": experiment.memory,
            **self._states,
        }
        given |= self._given("batch_size", "hash_data")
        if experiment.dtype is not None:
            given["dtype"] = DTYPES[experiment.dtype]
        return given

    def _given(self, *names: str) -> dict[str, Any]:
        """Return the settings of these names that were given."""
        values = {name: getattr(self.experiment, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _states(self) -> dict[str, Any]:
        """The run, or the checkpoints; those of the run where an automatic plan prefers them."""
        run, checkpoints = self.run, self.checkpoints
        if self.experiment.plan.get("auto"):
            run, checkpoints = settle_states(self.plan, run, checkpoints, self.task)
        return {"checkpoints": checkpoints, "run": run}

    @property
    def illustrations(self) -> Illustrations:
        """How queries are shown to a person, as far as the task's module says."""
        names = ("query_pictures", "query_texts", "query_labels", "example_texts")
        return Illustrations(*map(self._find_by_convention, names))

    def has(self, name: str) -> bool:
        """Tell whether an object is named, or found by convention."""
        return getattr(self.experiment, name) is not None or self._find_by_convention(name, call=False) is not None

    def _require(self, name: str, what: str) -> Any:
        found = self._load(name)
        if found is None:
            raise ConfigurationError(
                f"{self.experiment.task} has no {name!r} beside it: give {what} with --{name} FILE.py:NAME."
            )
        return found

    def _load(self, name: str, *, call: bool = True) -> Any:
        string = getattr(self.experiment, name)
        return self._find_by_convention(name, call=call) if string is None else self._find(name, string, call=call)

    def _find_by_convention(self, name: str, *, call: bool = True) -> Any:
        """Look up a conventional name in the task's module; ignore a module of that name."""
        found = getattr(self._module, name, None)
        if inspect.ismodule(found):
            return None
        return _call_function(found, f"{self._place}:{name}", name) if call else found

    def _find(self, what: str, string: str, *, call: bool = True) -> Any:
        module, name = (_load_module(string), string.rpartition(":")[2]) if ":" in string else (self._module, string)
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                known = [name for name in dir(found) if not name.startswith("_")]
                if what == "sources":
                    known.append(PER_EXAMPLE)
                raise ConfigurationError(f"{string} ({what}): there is no {part!r}{suggest_names(part, known)}")
            found = getattr(found, part)
        return _call_function(found, string, what) if call else found


def _call_function(found: Any, string: str, what: str) -> Any:
    """Call a function without arguments, and return any other object as it is."""
    if not inspect.isfunction(found):
        return found
    parameters = inspect.signature(found).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    if needed:
        raise ConfigurationError(
            f"{string} is a function that needs {' and '.join(needed)}, but it is called without arguments: give "
            f"{_TYPE_NAMES.get(what, f'the {what}')}, or a function without arguments that returns it."
        )
    try:
        return found()
    except ImprintError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{string}() failed: {_locate_error(error)}") from error


def load_function(string: str) -> tuple[Callable[..., Any], bytes]:
    """Load a function by its import string, with the text of its file."""
    module, name = _load_module(string), string.rpartition(":")[2]
    found = getattr(module, name, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigurationError(f"{string} is not a function{suggest_names(name, known)}")
    file = getattr(module, "__file__", None)
    if file is None:
        raise ConfigurationError(f"{string} is in no file, so that a change of it could not be noticed.")
    return found, Path(file).read_bytes()


def _load_module(string: str) -> ModuleType:
    """Load the module that an import string names, once."""
    path, colon, name = string.rpartition(":")
    if not colon or not path or not name:
        raise ConfigurationError(
            f"{string!r} is neither an import string (FILE.py:NAME or package.module:NAME) nor a built-in setting "
            f"({', '.join(SETTINGS)})."
        )
    try:
        return _load_file(Path(path)) if path.endswith(".py") else _import_package(path)
    except ImprintError:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise ConfigurationError(f"{path} could not be loaded: {_locate_error(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}.")
    path = path.resolve()
    name = f"imprint_experiment_{path.stem}_{zlib.crc32(bytes(path)):08x}"  # files in two folders may share a name
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:  # as if the file were run as a script
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_package(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"there is no module {name}: run the command from the folder that contains it."
            ) from error
        raise


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are in the user's own code, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_LIBRARY_PREFIXES)]


def _locate_error(error: BaseException) -> str:
    """Describe an error in the user's code: the last line of it, and the first line of the message.

    Torch announces what does not fit a model in a line that ends with a colon, so some of those below are told too.
    """
    theirs = user_frames(error)
    place = f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}: " if theirs else ""
    first, below = first_line(error), [line.strip() for line in str(error).strip().splitlines()[1:]]
    if not first.endswith(":") or not below:
        return f"{place}{first}"
    more = f" … and {len(below) - _BELOW} lines more" if len(below) > _BELOW else ""
    return f"{place}{first} {' '.join(below[:_BELOW])}{more}"


_BELOW = 2  # lines of a message below the one that announces them
_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FOLDERS = (str(Path(__file__).parent), *_LIBRARIES)
_LIBRARY_PREFIXES = ("<", *(f"{folder}/" for folder in _FOLDERS))  # "<frozen importlib…>" and the like
