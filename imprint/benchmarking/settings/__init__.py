"""Ready-made experiments: data, model and training, so that a claim can be checked with one call."""

from imprint.benchmarking.settings.catalogue import SETTINGS, Ready, ready

__all__ = ["SETTINGS", "Ready", "ready"]
