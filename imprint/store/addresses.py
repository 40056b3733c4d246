"""The addresses of folders in buckets, such as s3://bucket/runs/news, and where their files are cached.

An address holds no secrets: credentials come from the environment alone, and an address with a user, a password or a
query is refused without being repeated.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from imprint.errors import StoreError

CACHE = "IMPRINT_CACHE"
SCHEMES = ("s3", "gs", "az", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # Path("s3://a") has one slash only
_ABSOLUTE = re.compile(r"file:/(?:/(?:localhost)?/)?(?=[^/])(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}", re.ASCII)
_PART = re.compile(r"[\w.~+=,-]+", re.ASCII)
_SHOWN = re.compile(r"[^A-Za-z0-9.-]+")


@dataclass(frozen=True)
class Address:
    """A folder in a bucket; of `file`, the bucket is empty and the path absolute."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path.lstrip('/')}".rstrip("/")

    def of(self, name: str) -> str:
        """Return the address of an object in the folder."""
        return f"{self}/{name}"

    @property
    def cache(self) -> Path:
        """The folder on this machine that belongs to the address."""
        tail = _SHOWN.sub("-", str(self).rsplit("/", 1)[-1])[-40:]
        return cache_folder() / f"{tail}-{hashlib.sha256(str(self).encode()).hexdigest()[:16]}"


def cache_folder() -> Path:
    """Return the folder in which files of buckets are cached: IMPRINT_CACHE, or `imprint` in the user's cache."""
    if given := os.environ.get(CACHE):
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "imprint"


def is_address(place: object) -> bool:
    """Tell whether a place is the address of a bucket, and not a path; a path made of an address counts, too.

    >>> is_address("s3://bucket/news"), is_address(Path("s3://bucket/news")), is_address("runs/news")
    (True, True, False)
    """
    if not isinstance(place, str | os.PathLike):
        return False
    text = os.fspath(place)
    found = _URL.match(text) if isinstance(text, str) else None
    return found is not None and (found[1].lower() in SCHEMES or "://" in text)


def elsewhere(place: str | os.PathLike[str]) -> str:
    """Return a place as other processes open it: an address as it is, and an absolute path.

    >>> elsewhere("s3://bucket/news"), elsewhere(Path("/runs/news"))
    ('s3://bucket/news', '/runs/news')
    """
    return os.fspath(place) if is_address(place) else str(Path(place).absolute())


def parse_address(place: str | os.PathLike[str]) -> Address:
    """Read the address of a folder in a bucket.

    >>> print(parse_address("s3://bucket/runs/news/"))
    s3://bucket/runs/news
    """
    text = os.fspath(place)
    found = _URL.fullmatch(text)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in SCHEMES:
        raise StoreError(
            f"addresses of the kind {scheme}: are not known: give a folder, or s3://bucket/path, gs://bucket/path, "
            "az://container/path or file:///path."
        )
    if scheme == "file":
        return _parse_file(text)
    bucket, *parts = found[2].rstrip("/").split("/")
    if re.search(r"[@?#:]", found[2]):
        raise StoreError(
            f"the address of a {scheme} bucket holds a bucket and a path, and no user, password, port or query (it is "
            "not repeated here, since it may hold a secret): credentials and endpoints come from the environment."
        )
    if _BUCKET.fullmatch(bucket) is None:
        raise StoreError(f"{text} names no bucket: give {scheme}://bucket/path.")
    if not parts:
        raise StoreError(f"{text} is a whole bucket: give a folder in it, such as {scheme}://{bucket}/news.")
    if any(_PART.fullmatch(part) is None or set(part) == {"."} for part in parts):
        raise StoreError(
            f"{text} cannot be used: the parts of its path must be of letters, digits and any of _ . ~ + = , -"
        )
    return Address(scheme, bucket, "/".join(parts))


def _parse_file(text: str) -> Address:
    found = _ABSOLUTE.fullmatch(text)
    path = unquote(found[1]).rstrip("/") if found else ""
    if not path or ".." in path.split("/") or "\0" in path:
        raise StoreError(f"{text} is no address of a folder: give file:///absolute/path.")
    return Address("file", "", f"/{path}")
