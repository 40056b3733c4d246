"""Runs the command line: `python -m imprint` is the same as `imprint`."""

from imprint.cli.app import main

if __name__ == "__main__":
    main()
