"""Finds public data files in the folder that IMPRINT_DATA names, or downloads them once."""

import os
from pathlib import Path

from imprint.errors import DataError, MissingExtra


def fetch(name: str, url: str, checksum: str) -> Path:
    """Return the path of file `name`, such as "mnist/train-images-idx3-ubyte.gz".

    checksum: the SHA-256 that a download must have.
    """
    folder = os.environ.get("IMPRINT_DATA")
    if folder and (Path(folder) / name).is_file():
        return Path(folder) / name
    try:
        import pooch
    except ImportError as error:
        raise MissingExtra(f"downloading {name}", "bench") from error
    cache = pooch.os_cache("imprint") / Path(name).parent
    try:
        return Path(pooch.retrieve(url, f"sha256:{checksum}", fname=Path(name).name, path=cache))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} could not be downloaded from {url} ({error}): put the file into a folder, and set "
            "IMPRINT_DATA to that folder."
        ) from error
