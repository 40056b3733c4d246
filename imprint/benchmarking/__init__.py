"""Judging methods: ready-made settings, peers, sweeps, comparisons and the demo."""
