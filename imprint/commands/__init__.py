"""The commands of `imprint.cli`, by subject."""
