"""Provides built-in settings: data, model and training, so that a claim can be checked with one call."""

from imprint.benchmarking.settings.catalogue import SETTINGS, BuiltIn, load_setting

__all__ = ["SETTINGS", "BuiltIn", "load_setting"]
