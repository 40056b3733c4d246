"""Reads the files that say whose sources are, for `imprint simulate --about` and `imprint describe`."""

from collections.abc import Sequence

from imprint.about import About
from imprint.cli.experiment import split_about
from imprint.errors import ConfigurationError
from imprint.store.about_files import read_about


def read_descriptions(texts: Sequence[str]) -> dict[str, About]:
    """Read descriptions from files, each given as FILE or as SOURCE=FILE; refuse two of one source."""
    found: dict[str, About] = {}
    origin: dict[str, str] = {}
    for text in texts:
        source, file = split_about(text)
        for name, about in read_about(file, source).items():
            if name in found:
                raise ConfigurationError(f"source {name!r} is described twice, in {origin[name]} and in {file}.")
            found[name], origin[name] = about, file
    return found
