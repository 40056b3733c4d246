"""Compares predicted effects with removals that were really made, and keeps the outcome with the store."""
