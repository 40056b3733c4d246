"""Ready-made experiments: data, model and training, so that a claim can be checked with one call."""

from imprint.settings.catalogue import SETTINGS, Ready, ready

__all__ = ["SETTINGS", "Ready", "ready"]
