"""Judges methods: built-in settings, peers, sweeps, comparisons and the demo."""
