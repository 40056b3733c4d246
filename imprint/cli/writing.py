"""Checks where a command is to write, before anything is computed."""

from pathlib import Path

from imprint.errors import ConfigurationError, StoreError


def check_output(out: Path | None, *suffixes: str, remark: str = "") -> None:
    """Refuse a file with another suffix, or in a folder that does not exist."""
    if out is None:
        return
    if out.suffix not in suffixes:
        raise ConfigurationError(f"--out must end in {' or '.join(suffixes)}{remark}, got {out}.")
    if not out.parent.is_dir():
        raise StoreError(f"could not write {out}: there is no folder {out.parent}.")
