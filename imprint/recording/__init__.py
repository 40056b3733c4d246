"""Recordings: folders that let a training run be repeated, step by step, with a source at another weight."""
