"""Labelled scores: how they are computed, shown, combined and kept in a file."""
