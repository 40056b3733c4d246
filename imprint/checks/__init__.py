"""Trying a task on a few examples before trusting it: its loss, its measure, its derivatives."""
