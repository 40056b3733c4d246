"""Imprint: how much does each data source move this prediction? Answered with forward passes only."""

from imprint.about import About
from imprint.attribution.changes import Change, Changes
from imprint.attribution.combining import combine
from imprint.attribution.drilling import Inside, drill_down
from imprint.attribution.result import Attribution
from imprint.attribution.scoring import attribute, self_influence
from imprint.attribution.top import Credit, Top
from imprint.attribution.versions import compare
from imprint.checking import Check, check
from imprint.errors import (
    ConfigurationError,
    DataError,
    ImprintError,
    MissingExtra,
    PartsError,
    PlanError,
    ReadoutError,
    SimulationError,
    SourcesError,
    StoreError,
    TaskError,
)
from imprint.evaluation.validating import Comparison, validate
from imprint.forms import NumbersForm, PictureForm
from imprint.plan import Plan
from imprint.readout.reader import Reader
from imprint.recorder import Recorder
from imprint.recording.reading import Recording
from imprint.recording.writing import RunRecorder
from imprint.simulation import auto as _auto  # noqa: F401  (makes Plan.auto work)
from imprint.simulation.executors import RayExecutor
from imprint.simulation.merging import merge
from imprint.simulation.parts import simulate_part
from imprint.simulation.revising import drop
from imprint.simulation.runner import simulate
from imprint.simulation.updating import update
from imprint.sources import Sources
from imprint.store.about_files import read_about
from imprint.store.parts import Part
from imprint.store.reading import Store
from imprint.task import Task

__version__ = "0.1.0"

__all__ = [
    "About",
    "Attribution",
    "Change",
    "Changes",
    "Check",
    "Comparison",
    "ConfigurationError",
    "Credit",
    "DataError",
    "ImprintError",
    "Inside",
    "MissingExtra",
    "NumbersForm",
    "Part",
    "PartsError",
    "PictureForm",
    "Plan",
    "PlanError",
    "RayExecutor",
    "Reader",
    "ReadoutError",
    "Recorder",
    "Recording",
    "RunRecorder",
    "SimulationError",
    "Sources",
    "SourcesError",
    "Store",
    "StoreError",
    "Task",
    "TaskError",
    "Top",
    "attribute",
    "check",
    "combine",
    "compare",
    "drill_down",
    "drop",
    "merge",
    "read_about",
    "self_influence",
    "simulate",
    "simulate_part",
    "update",
    "validate",
]
