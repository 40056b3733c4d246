"""Implements the command line: the commands, the loading of experiments, and terminal output."""
