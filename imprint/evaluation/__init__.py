"""Checking attributions against what really happens."""
