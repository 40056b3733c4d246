"""Objects in a bucket: read with a bound, downloaded with a checksum, uploaded, and replaced only if nobody else has.

Nothing is ever listed. `obstore` is imported here alone; it repeats failed requests and bounds their time. Errors name
the address of the object, and no secrets.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from imprint.errors import MissingExtra, StoreError
from imprint.store.addresses import Address
from imprint.store.files import Lock, sync, temporary_folder
from imprint.store.values import clipped

_CLOCK = "unfinished.clock"
_PIECE = 32 << 20  # bytes that are downloaded at once
_LONGEST = 256 << 20  # bytes of an object that is replaced as a whole
_SECRET = re.compile(r"SECRET|KEY|TOKEN|PASSWORD|CREDENTIAL|SAS|SIGNATURE", re.IGNORECASE)
_QUERY = re.compile(r"\?\S+")
_LONG = 200  # characters of an error's reason
_WAIT = 10.0  # seconds, for another process that replaces an object of a file: address
_RETRIES: Any = {"max_retries": 8}
_PLAIN = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")


class Known(NamedTuple):
    """What an object is known to be."""

    sha256: str
    bytes: int


class Object(NamedTuple):
    """An object as it was read: its content, what identifies that version of it, and when it was written."""

    content: bytes
    tag: str
    written: float


class Bucket:
    """The objects of a folder in a bucket.

    client: an `obstore` store in place of the one that the address names.
    """

    def __init__(self, address: Address, client: Any = None) -> None:
        self.address = address
        self._client = _connect(address) if client is None else client

    def read(self, name: str, longest: int) -> Object | None:
        """Read a small object; None if there is none."""
        import obstore

        with self._explained("read", name):
            try:
                found = obstore.get(self._client, name)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise StoreError(f"{self.address}: there is no bucket {self.address.bucket!r}.") from None
                return None
            about = found.meta
            if about["size"] > longest:
                raise StoreError(
                    f"{self.address.of(name)} cannot be read: it has {about['size']:,} bytes, and at most {longest:,} "
                    "are expected."
                )
            content = bytes(found.bytes())
            if len(content) != about["size"]:
                raise StoreError(f"{self.address.of(name)} cannot be read: the download ended early.")
            return Object(content, str(about["e_tag"]), about["last_modified"].timestamp())

    def download(self, name: str, known: Known, place: Path) -> None:
        """Put an object into a file, which appears only once it is there in full and matches its checksum."""
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(place.parent).free
            if known.bytes > free:
                raise StoreError(
                    f"{self.address.of(name)} has {known.bytes:,} bytes, and {free:,} are free at {place.parent}: make "
                    "room, or set IMPRINT_CACHE to a folder with more."
                )
            with temporary_folder(place.parent) as folder:
                beside = folder / f"file{place.suffix}"
                with beside.open("wb") as file:
                    for piece in self._checked(name, known):
                        file.write(piece)
                sync(beside)
                beside.replace(place)
        except OSError as error:
            raise StoreError(f"could not write {place}: {error.strerror or error}.") from error

    def check(self, name: str, known: Known) -> None:
        """Refuse an object that is missing or is not what was uploaded. It is downloaded, and not kept."""
        for _ in self._checked(name, known):
            pass

    def _checked(self, name: str, known: Known) -> Iterator[bytes]:
        """Yield the pieces of an object; at its end, refuse one that differs from its checksum."""
        import obstore

        place, digest = self.address.of(name), hashlib.sha256()
        with self._explained("read", name):
            try:
                size = obstore.head(self._client, name)["size"]
            except FileNotFoundError:
                raise StoreError(f"{place} is missing: what is kept there is damaged.") from None
        if size != known.bytes:
            raise StoreError(f"{place} is damaged: it has {size:,} bytes, {known.bytes:,} were written.")
        for start in range(0, size, _PIECE):
            end = min(size, start + _PIECE)
            with self._explained("read", name):
                piece = bytes(obstore.get_range(self._client, name, start=start, end=end))
            if len(piece) != end - start:
                raise StoreError(f"{place} cannot be read: the download ended early.")
            digest.update(piece)
            yield piece
        if digest.hexdigest() != known.sha256:
            raise StoreError(f"{place} is damaged: it differs from its checksum.")

    def upload(self, name: str, content: Path | bytes) -> None:
        """Put a file into an object, or some bytes; readers see all of it, or what was there before."""
        import obstore

        with self._explained("write", name):
            obstore.put(self._client, name, content)

    def swap(self, name: str, content: bytes, tag: str | None) -> str | None:
        """Replace an object that is still the version `tag`, or is still absent; return the new one's tag.

        None if somebody else was first.
        """
        import obstore
        from obstore import exceptions

        mode: Any = "create" if tag is None else {"e_tag": tag}
        try:
            with self._explained("write", name), self._alone():
                if self.address.scheme == "file" and tag is not None:
                    if obstore.head(self._client, name)["e_tag"] != tag:
                        raise exceptions.PreconditionError("another version")
                    mode = "overwrite"
                return str(obstore.put(self._client, name, content, mode=mode, use_multipart=False)["e_tag"])
        except NotImplementedError as error:
            raise StoreError(
                f"{self.address} cannot be written to: it has no conditional writes (If-Match), without which two "
                "processes could overwrite each other's work."
            ) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError):
            now = self.read(name, _LONGEST)  # a repeated request may be told of its own first attempt
            return now.tag if now is not None and now.content == content else None

    def tag(self, name: str) -> str | None:
        """Return what identifies the present version of an object; None if there is none."""
        import obstore

        with self._explained("read", name):
            try:
                return str(obstore.head(self._client, name)["e_tag"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from the same folder meanwhile: a file system has no conditional writes."""
        if self.address.scheme != "file":
            yield
            return
        end, lock = time.monotonic() + _WAIT, None
        while lock is None:
            try:
                lock = Lock(Path(self.address.path))
            except StoreError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        try:
            yield
        finally:
            lock.release()

    def now(self) -> float:
        """Return the time by the clock that dates objects; that of this machine may be minutes off."""
        self.upload(_CLOCK, b".")
        found = self.read(_CLOCK, 1)
        self.delete(_CLOCK)
        return time.time() if found is None else found.written  # another process has just done the same

    def delete(self, name: str) -> None:
        """Delete an object that nothing refers to any more; it does no harm if that fails."""
        import obstore
        from obstore.exceptions import BaseError

        with contextlib.suppress(BaseError, OSError):
            obstore.delete(self._client, name)

    @contextlib.contextmanager
    def _explained(self, what: str, name: str) -> Iterator[None]:
        """Name the object in errors, without what could be a secret."""
        from obstore import exceptions

        passed = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError, NotImplementedError)
        try:
            yield
        except passed:
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            place = self.address.of(name)
            raise StoreError(f"could not {what} {place}: {describe_failure(error)}.") from None


def describe_failure(error: BaseException) -> str:
    """Return the first line of an error of `obstore`, without queries and values of secret environment variables."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 4:
            text = text.replace(value, "…")
    return clipped(_QUERY.sub("?…", text), _LONG).rstrip(". ")


def _connect(address: Address) -> Any:
    """Return the `obstore` store of an address; credentials and endpoints come from the environment."""
    try:
        from obstore import exceptions, store
    except ImportError:
        raise MissingExtra(f"{address.scheme}:// addresses", "cluster") from None
    try:
        if address.scheme == "file":
            return store.LocalStore(prefix=address.path, mkdir=True)
        made: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[address.scheme]
        return made(address.bucket, prefix=address.path, client_options=_choose_options(), retry_config=_RETRIES)
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise StoreError(f"{address} cannot be opened: {describe_failure(error)}.") from None


def _choose_options() -> Any:
    """Return the options of requests, which hide what the environment says of plain HTTP."""
    plain = any(os.environ.get(name, "").lower() in ("1", "true") for name in _PLAIN)
    return {"timeout": "120s", "connect_timeout": "10s", "allow_http": plain}
