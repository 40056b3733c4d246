"""The commands of `imprint.cli.app`, by subject."""
