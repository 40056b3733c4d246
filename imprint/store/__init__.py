"""Stores on disk: reading, writing, fingerprints, and the files below them."""
