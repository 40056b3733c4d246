"""Checking attributions against what really happens."""

from imprint.evaluation.metrics import Metric, evaluate, lds, loo, mislabel_auc, overlap, slope
from imprint.evaluation.retraining import Together, Train, retrain
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.training import Training
from imprint.evaluation.truth import Truth

__all__ = [
    "Metric",
    "Subsets",
    "Together",
    "Train",
    "Training",
    "Truth",
    "evaluate",
    "lds",
    "loo",
    "mislabel_auc",
    "overlap",
    "retrain",
    "slope",
]
