"""Compares attributions with what really happens: ground truth by retraining, and metrics."""

from imprint.evaluation.effects import SourceEffect, list_effects
from imprint.evaluation.metrics import Metric, evaluate, lds, loo, overlap, slope
from imprint.evaluation.mislabels import MislabelDetection, detection_auc, example_losses, mislabel_auc
from imprint.evaluation.parts import merge_truth
from imprint.evaluation.recorded import record_training
from imprint.evaluation.replaying import Record, replay_run, replay_seeds
from imprint.evaluation.reports.illustrations import Illustrations
from imprint.evaluation.reports.page import Preface, write_report
from imprint.evaluation.retraining import retrain, retrain_part
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together, Train
from imprint.evaluation.training import Training
from imprint.evaluation.truth import Truth

__all__ = [
    "Illustrations",
    "Metric",
    "MislabelDetection",
    "Preface",
    "Record",
    "SourceEffect",
    "Subsets",
    "Together",
    "Train",
    "Training",
    "Truth",
    "detection_auc",
    "evaluate",
    "example_losses",
    "lds",
    "list_effects",
    "loo",
    "merge_truth",
    "mislabel_auc",
    "overlap",
    "record_training",
    "replay_run",
    "replay_seeds",
    "retrain",
    "retrain_part",
    "slope",
    "write_report",
]
