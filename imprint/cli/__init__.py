"""The command line, and the loading of experiments for it."""
