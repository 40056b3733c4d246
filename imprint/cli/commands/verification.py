"""Implements `imprint verify`: are the files of a store or an export intact, and does a server serve the export?"""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

import imprint
from imprint.cli.commands.options import AsJson, SignedBy
from imprint.cli.terminal import console, errors, escape_markup
from imprint.errors import ConfigurationError
from imprint.export.record import RECORD
from imprint.store.addresses import is_address
from imprint.store.remote import name_place
from imprint.validation.witnesses import verify_witnesses


def verify(
    store: Annotated[Path, typer.Argument(help="The folder of a store or of an export, or a store in a bucket.")],
    url: Annotated[
        str | None,
        typer.Option(
            help="The address of a server with the export's adapters, as in `http://127.0.0.1:8000`, to compare with "
            "PyTorch."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="IMPRINT_API_KEY", help="The key that the server asks for, if any.")
    ] = None,
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Check every file of a store or an export against its checksum. Exits with status 1 if one is damaged or missing.

    With `--url`, the log-likelihoods that a serving engine finds for the export's probes, under every adapter, must be
    those that PyTorch found: a different base model or adapter, or an engine that ignores some layers, is an error.

    With `--signed-by`, a store that is not signed with that key, or was changed since, is refused too.

    For example: `imprint verify runs/news`, or `imprint verify news-vllm --url http://127.0.0.1:8000`
    """
    if not is_address(store) and (store / RECORD).is_file():
        if signed_by is not None:
            raise ConfigurationError(f"--signed-by is for stores, and {store} is an export: exports are not signed.")
        _verify_export(store, url, api_key, json)
        return
    if url is not None:
        raise ConfigurationError(
            f"--url compares a server with an export, and {name_place(store)} is not one: give its folder."
        )
    opened = imprint.Store(store, signed_by=signed_by)
    opened.verify()
    verify_witnesses(opened)
    if json:
        typer.echo(dumps({"path": opened.place, "bytes": opened.bytes, "sound": True}))
    else:
        text = f"{escape_markup(opened.place)}: all files match their checksums ({opened.bytes:,} bytes)."
        console.print(text, soft_wrap=True)


def _verify_export(folder: Path, url: str | None, api_key: str | None, json: bool) -> None:
    from imprint.export import Export, RemoteReader

    export, check = Export.open(folder), None
    if url is not None:
        with errors.status("comparing the server with PyTorch"):
            check = RemoteReader(export, url, api_key=api_key).check()
    if json:
        typer.echo(dumps({"path": str(folder), "sound": True, "server": None if check is None else asdict(check)}))
        return
    text = f"{escape_markup(folder)}: all {len(export.files)} files match their checksums."
    console.print(text if check is None else f"{text}\n{escape_markup(str(check))}.", soft_wrap=True)
