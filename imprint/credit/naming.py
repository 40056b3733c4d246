"""Names the files of statements after their sources, so that no two share a file on any file system."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

_OTHER = re.compile(r"[^\w.-]+")
_RESERVED = re.compile(r"(con|prn|aux|nul|conin|conout|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # by Windows, as devices
_LONGEST = 60  # characters
_BYTES = 180  # file systems allow 255, with the hash and the suffix


def name_files(sources: Sequence[str]) -> dict[str, str]:
    """Return a file name for each source: its id, with - for spaces. If more had to be changed, it ends in a hash.

    A source whose id is a file name has it, unless another's differs in case alone. Names differ even where a file
    system takes upper and lower case, or composed and decomposed letters, for the same.

    >>> name_files(["times", " times"])
    {'times': 'times', ' times': 'times-d86e5392'}
    """
    stems = {source: _make_plain(source) for source in sources}
    kept = _keep_unique({source: stem for source, stem in stems.items() if stem == source}, set())
    spaced = {source: stem for source, stem in stems.items() if source not in kept and source.replace(" ", "-") == stem}
    kept |= _keep_unique(spaced, set(map(_fold, stems.keys() - spaced.keys())))
    names, used = dict[str, str](), set(map(_fold, kept.values()))
    for source, stem in stems.items():
        name, digest, length = kept.get(source), hashlib.sha256(source.encode()).hexdigest(), 8
        while name is None or (source not in kept and _fold(name) in used):
            name, length = f"{stem}-{digest[:length]}", length + 8
        used.add(_fold(name))
        names[source] = name
    return names


def _keep_unique(names: dict[str, str], taken: set[str]) -> dict[str, str]:
    """Return the names that no other name, and none of those that are taken, could be confused with."""
    often = Counter(map(_fold, names.values()))
    return {source: name for source, name in names.items() if often[_fold(name)] == 1 and _fold(name) not in taken}


def _make_plain(source: str) -> str:
    """Return a name that every file system can have: letters, digits and . _ - alone, and none of the devices."""
    stem = _OTHER.sub("-", unicodedata.normalize("NFC", source))[:_LONGEST]
    stem = stem.encode()[:_BYTES].decode(errors="ignore").strip("-. ")
    return f"source-{stem}" if _RESERVED.fullmatch(stem) else stem or "source"


def _fold(name: str) -> str:
    """Return what names have in common that some file system takes for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
