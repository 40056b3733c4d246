"""Implements `imprint credit check`, `verify` and `dispute`, which change nothing that was credited."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

import imprint
from imprint.cli.accounts import print_lines
from imprint.cli.commands.credit_options import Heads, Place, PublicKeys, read_heads_of
from imprint.cli.commands.options import AsJson, DeviceName, SignedBy, StorePath, StoreTask
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import errors, redirect_prints, show_progress
from imprint.errors import ConfigurationError


def check(
    statement: Annotated[Path, typer.Argument(metavar="STATEMENT", help="The `.jsonl` file of a statement.")],
    public_key: PublicKeys = None,
    heads: Heads = None,
    json: AsJson = False,
) -> None:
    """Check the proofs of a statement, without access to the ledger. Exits with status 1 if they do not hold.

    For example: `imprint credit check times.jsonl --public-key credit.key.pub --heads heads.jsonl`
    """
    from imprint.credit import check_statement

    if not public_key:
        raise ConfigurationError("give the payer's public key (--public-key), from the contract or its website.")
    found = check_statement(statement, public_key, read_heads_of(heads))
    if json:
        paid = {"source": found.source, "period": found.period, "entries": found.entries, "amount": found.amount}
        paid |= {"units": found.units, "first": found.first, "stop": found.stop, "heads": found.heads}
        typer.echo(dumps({"holds": found.holds, **paid, "key": found.head.key, "problems": list(found.problems)}))
    else:
        print_lines(repr(found))
    if not found.holds:
        raise typer.Exit(1)


def verify(ledger: Place, public_key: PublicKeys = None, heads: Heads = None, json: AsJson = False) -> None:
    """Verify a ledger: every hash, every amount, every closed period and every signed head.

    Exits with status 1 if an entry was changed, removed, moved or inserted, or if an amount cannot be recomputed.

    For example: `imprint credit verify -l credit.db --public-key credit.key.pub --heads heads.jsonl`
    """
    from imprint.credit import Ledger
    from imprint.credit import verify as verify_ledger

    with show_progress(errors, "verifying") as advance, Ledger(ledger) as opened:
        found = verify_ledger(opened, heads=read_heads_of(heads), key=public_key, progress=advance)
    if json:
        listed = [{"sequence": each.sequence, "span": each.span, "text": each.text} for each in found.problems]
        values = {"holds": found.holds, "entries": found.entries, "heads": found.heads, "problems": listed}
        typer.echo(dumps({**values, "remarks": list(found.remarks), "seconds": found.seconds}))
    else:
        print_lines(repr(found))
    if not found.holds:
        raise typer.Exit(1)


def dispute(
    context: typer.Context,
    ledger: Place,
    entry: Annotated[int, typer.Argument(metavar="ENTRY", help="The number of an entry.")],
    store: StorePath,
    task: StoreTask = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far scores may deviate, relative to the largest.")
    ] = 1e-3,
    calibration: Annotated[
        float, typer.Option(help="The factor by which scores were to be calibrated, to compare with the entry's.")
    ] = 1.0,
    note: Annotated[bool, typer.Option(help="Note the outcome in the log.")] = False,
    signed_by: SignedBy = None,
    device: DeviceName = None,
    json: AsJson = False,
) -> None:
    """Compute a credited query again, and compare. Exits with status 1 if it differs.

    For example: `imprint credit dispute 12 runs/news -l credit.db --task my_model.py:task`
    """
    from imprint.credit import Ledger
    from imprint.credit import dispute as settle

    opened = imprint.Store(store, signed_by=signed_by)
    given = Experiment(task=task, device=device)
    if given.task is None:
        given = merge_with_store(given, opened, ("task",), context)
    with redirect_prints(), Ledger(ledger) as book:
        found = settle(
            book, entry, Objects(given).task, opened, tolerance=tolerance, calibration=calibration, note=note
        )
    if json:
        rows = [row._asdict() for row in found.rows]
        typer.echo(
            dumps({"agrees": found.agrees, "difference": found.difference, "others": found.others, "rows": rows})
        )
    else:
        print_lines(repr(found))
    if not found.agrees:
        raise typer.Exit(1)
