"""Implements the commands of `imprint.cli.app`, by subject."""
