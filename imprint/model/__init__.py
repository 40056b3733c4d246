"""Handles the user's model: a copy that is safe to compute with, unsupported models, dropout, measurements by name."""
