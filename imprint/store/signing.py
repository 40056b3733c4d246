"""Signs stores, so that exchanging two sources is detected.

The checksums in a store show damage, not tampering: whoever may write to its folder can swap two source ids and seal
the manifest again, and every later payment goes to the wrong publisher. A signature covers the manifest, which has the
checksums of all files, the validation, and what is known of the sources, such as their owners. It is checked when a
store is opened with the public key.
"""

import base64
import binascii
import json
import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from imprint.errors import StoreError
from imprint.keys import PrivateKey, PublicKey, identify_key, is_signed, load_private_key, load_public_key
from imprint.store.describing import ABOUT
from imprint.store.files import refuse_unreadable, sha256, write
from imprint.store.manifest import MANIFEST
from imprint.store.values import parsed, read_json

if TYPE_CHECKING:
    from imprint.store.reading import Store

logger = logging.getLogger(__name__)
SIGNATURE = "signature.json"
VALIDATION = "validation.json"  # of `imprint.validation`, which lies above this package
_KIND = "imprint store"
_LONGEST = 1 << 16  # bytes
_AGAIN = "If you changed it, sign it again."


@dataclass(frozen=True)
class Signed:
    """What the owner of a key has signed: the checksums of a store, its validation and its descriptions, if any."""

    key: str
    store: str
    validation: str | None
    description: str | None = None

    def check_validation(self, folder: Path, digest: str | None) -> None:
        """Refuse a validation, by its checksum, that was changed or added or removed after the store was signed."""
        if digest != self.validation:
            raise StoreError(f"{folder}: its validation was changed after it was signed. {_AGAIN}")

    def check_description(self, folder: Path, digest: str | None) -> None:
        """Refuse descriptions of sources, by their checksum, that were changed or added after the store was signed."""
        if digest != self.description:
            raise StoreError(
                f"{folder}: what it says of its sources ({ABOUT}: owners, licences, addresses) was changed after it "
                f"was signed. {_AGAIN}"
            )


def sign_store(store: "Store", key: PrivateKey) -> Path:
    """Sign a store with a private key, as it was opened; return the file of the signature.

    Sign it again after it was validated, or its sources were described: the signature covers both.
    """
    store.verify()
    signer, place = load_private_key(key), store.path
    if _hash(place / MANIFEST) != store.sha256 or _hash(place / ABOUT) != store.description_sha256:
        raise StoreError(f"{place} was changed since it was opened: open it again, and look at it before you sign it.")
    about = {
        "kind": _KIND,
        "store": store.sha256,
        "validation": _hash(place / VALIDATION),
        "description": store.description_sha256,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "key": identify_key(signer.public_key()),
    }
    content = json.dumps(about, sort_keys=True, separators=(",", ":"))
    signature = base64.b64encode(signer.sign(content.encode())).decode()
    text = json.dumps({"content": content, "signature": signature}, indent=1)
    with store.editing():
        write(place / SIGNATURE, lambda path: path.write_text(text, encoding="utf-8"))
    return place / SIGNATURE


def check_signature(folder: Path, store: str, signer: PublicKey) -> Signed:
    """Refuse a store, by its checksum, that the owner of a public key has not signed; return what was signed."""
    key, file = load_public_key(signer), folder / SIGNATURE
    if not file.is_file():
        raise StoreError(f"{folder} is not signed. It must be signed with key {identify_key(key)} (`imprint sign`).")
    parts = read_json(file, _LONGEST).record("content", "signature")
    content = parts["content"].text()
    try:
        signature = base64.b64decode(parts["signature"].text(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"{file} is not a signature: {error}.") from error
    if not is_signed(key, signature, content.encode()):
        raise StoreError(
            f"{folder} is not signed with key {identify_key(key)}: somebody else signed it, or the signature was "
            "changed. Do not use it before you know who made it."
        )
    about = parsed(content.encode(), file).mapping()
    if "kind" not in about or about["kind"].content != _KIND:
        raise StoreError(f"{file} is the signature of something else than a store.")
    beside = [about[name].content if name in about else None for name in ("validation", "description")]
    validation, description = (None if each is None else str(each) for each in beside)
    found = Signed(identify_key(key), about["store"].text(), validation, description)
    if store != found.store:
        raise StoreError(f"{folder}: the store was changed after it was signed. {_AGAIN}")
    found.check_validation(folder, _hash(folder / VALIDATION))
    return found


def warn_unsigned(folder: Path, what: str = "its sources were described") -> None:
    """Say that the signature of a store does not cover what has just been changed in it, if it has one."""
    if (folder / SIGNATURE).exists():
        logger.warning("%s was signed before %s: sign it again (`imprint sign`)", folder, what)


def warn_changed(folder: Path, digest: str | None) -> None:
    """Say that descriptions, by their checksum, are not those that a store was signed with.

    Signing the store again, as is advised after a change, would cover somebody else's change too. The signature is not
    checked: that takes the key, and a store that was opened with it refuses such descriptions.
    """
    file = folder / SIGNATURE
    try:
        if not file.is_file():
            return
        content = read_json(file, _LONGEST).record("content", "signature")["content"].text()
        about = parsed(content.encode(), file).mapping()
    except StoreError:
        return
    if (about["description"].content if "description" in about else None) != digest:
        logger.warning(
            "%s: what it says of its sources (%s) was changed after it was signed, and before it is described now: "
            "look at all of it before you sign it again",
            *(folder, ABOUT),
        )


def _hash(file: Path) -> str | None:
    """Return the checksum of a regular file; None if there is nothing in its place. A pipe would block."""
    try:
        if not os.path.lexists(file):
            return None
        refuse_unreadable(file)
        return sha256(file)
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror or error}.") from error
