"""Tests a task on a few examples before trusting it: its loss, its measurement, its derivatives."""
