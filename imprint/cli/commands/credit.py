"""Implements `imprint credit`: crediting results, signing heads, closing periods, statements, erasing queries."""

import warnings
from datetime import timedelta
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import imprint
from imprint.cli.accounts import print_lines, render_entry, render_receipt
from imprint.cli.commands.credit_checks import check, dispute, verify
from imprint.cli.commands.credit_options import (
    Key,
    PeriodName,
    Place,
    parse_amount,
    parse_time,
    read_policy,
    read_values,
)
from imprint.cli.commands.options import (
    AsJson,
    CollateString,
    DeviceName,
    QueriesString,
    SignedBy,
    StoreTask,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, escape_markup, redirect_prints, render_pairs, show_progress
from imprint.display import count_of
from imprint.errors import ConfigurationError, ReliabilityWarning

if TYPE_CHECKING:
    from imprint.credit.payloads import Payloads

credit = typer.Typer(
    help="""Credit queries to sources, in a tamper-evident log.

    A policy turns the effects that `imprint attribute` finds into shares, and a ledger keeps them: a SQLite file or a
    PostgreSQL database. Amounts are given in units of the currency.

    For example:

    - `imprint keys credit.key`, then `imprint credit create -l credit.db --currency EUR --per-query 0.002`

    - `imprint credit add scores.safetensors -l credit.db --policy policy.toml`

    - `imprint credit close 2026-11 -l credit.db`, `imprint credit head -l credit.db --key credit.key` and `imprint
    credit statements 2026-11 -l credit.db --out statements`

    - `imprint credit verify -l credit.db --public-key credit.key.pub --heads heads.jsonl`
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@credit.command()
def create(
    ledger: Place,
    currency: Annotated[str, typer.Option(help="The currency, such as `EUR`.")],
    per_query: Annotated[
        str | None, typer.Option(help="What each query pays. Default: a pot for each period pays instead.")
    ] = None,
    smallest: Annotated[str, typer.Option(help="The smallest payable amount.")] = "0.01",
    signed_by: Annotated[
        Path | None,
        typer.Option("--signed-by", help="A public key: only results of stores signed with it are credited."),
    ] = None,
) -> None:
    """Make a new ledger.

    For example: `imprint credit create -l credit.db --currency EUR --per-query 0.002`
    """
    from imprint.credit import Ledger, Tariff

    price = None if per_query is None else parse_amount(per_query)
    with Ledger.create(ledger, Tariff(currency, price, parse_amount(smallest)), signed_by=signed_by) as made:
        console.print(escape_markup(repr(made)), soft_wrap=True)


@credit.command()
def tariff(ledger: Place, per_query: Annotated[str, typer.Option(help="What each query pays from now on.")]) -> None:
    """Change what queries pay from now on. The currency and its smallest unit stay what they are.

    For example: `imprint credit tariff -l credit.db --per-query 0.003`
    """
    from imprint.credit import Ledger, Tariff

    with Ledger(ledger) as opened:
        before = opened.tariff
        opened.set_tariff(Tariff(before.currency, parse_amount(per_query), before.smallest))
        console.print(escape_markup(repr(opened)), soft_wrap=True)


@credit.command()
def add(
    context: typer.Context,
    ledger: Place,
    result: Annotated[
        Path,
        typer.Argument(
            metavar="SCORES|STORE",
            help="What `imprint attribute --out scores.safetensors` wrote; or a store, whose scores of the queries are "
            "computed and credited at once.",
        ),
    ],
    policy: Annotated[
        Path, typer.Option(help="The policy: a TOML or JSON file with its fields.", dir_okay=False, exists=True)
    ],
    pot: Annotated[str | None, typer.Option(help="What each query pays. Default: as the ledger says.")] = None,
    task: StoreTask = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    device: DeviceName = None,
    signed_by: SignedBy = None,
    caller: Annotated[str, typer.Option(help="The name of the caller; request keys are unique per caller.")] = "-",
    request_key: Annotated[
        str | None, typer.Option(help="Idempotency key: trying again with the same key credits nothing twice.")
    ] = None,
    retention_days: Annotated[
        int | None, typer.Option(min=1, help="Days to keep the queries before `erase --expired` erases them.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Credit the queries of a result to its sources.

    With --queries, the queries are kept beside the entries, so that a disputed entry can be computed again. A ledger
    that demands a signed store takes a store and --signed-by, because a file of scores could have been changed.

    For example:

    - `imprint credit add scores.safetensors -l credit.db --policy policy.toml --request-key 2026-11-18-a`

    - `imprint credit add runs/news --task my_model.py:task --signed-by store.key.pub -l credit.db --policy policy.toml`
    """
    from imprint.credit import Ledger

    rules = read_policy(policy)
    payloads: Payloads | None
    if result.is_dir():
        scores, payloads = _score_store(context, result, task, queries, collate, device, signed_by)
    else:
        scores, payloads = imprint.Attribution.load(result), _load_payloads(queries, collate)
    with Ledger(ledger) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)  # the receipt says who is credited, and why nobody
        receipt = opened.credit(
            scores,
            rules,
            pot=None if pot is None else parse_amount(pot),
            payloads=payloads,
            retention=None if retention_days is None else timedelta(days=retention_days),
            caller=caller,
            key=request_key,
        )
        found = render_receipt(receipt, opened.tariff.currency)
    if json:
        typer.echo(dumps(found))
    else:
        print_lines(found["text"])


def _score_store(
    context: typer.Context,
    place: Path,
    task: str | None,
    queries: str | None,
    collate: str | None,
    device: str | None,
    signed_by: Path | None,
) -> "tuple[imprint.Attribution, Payloads]":
    """Attribute queries with a store; return the result, and the queries to keep."""
    from imprint.credit import encode_queries

    store = imprint.Store(place, signed_by=signed_by)
    given = Experiment(task=task, queries=queries, collate_fn=collate, device=device)
    if given.task is None:
        given = merge_with_store(given, store, ("task", "queries", "collate_fn"), context)
    with redirect_prints(), show_progress(errors, "attributing") as advance:
        objects = Objects(given)
        options: Any = {"collate_fn": objects.query_collate_fn, "progress": advance}
        scores = imprint.attribute(objects.task, store, objects.queries, **options)
        return scores, encode_queries(objects.queries, collate_fn=objects.query_collate_fn)


def _load_payloads(queries: str | None, collate: str | None) -> "Payloads | None":
    from imprint.credit import encode_queries

    if queries is None:
        return None
    with redirect_prints():
        objects = Objects(Experiment(task=queries, queries=queries, collate_fn=collate))  # the task's file is theirs
        return encode_queries(objects.queries, collate_fn=objects.query_collate_fn)


@credit.command()
def show(
    ledger: Place,
    entry: Annotated[int | None, typer.Argument(metavar="[ENTRY]", help="The number of an entry.")] = None,
    json: AsJson = False,
) -> None:
    """Show what a ledger holds, or one of its entries.

    For example: `imprint credit show 12 -l credit.db`
    """
    from imprint.credit import Ledger
    from imprint.credit.periods import list_periods

    with Ledger(ledger) as opened:
        if entry is not None:
            leaf = opened.entry(entry)
            if json:
                typer.echo(dumps({**leaf.about, "rows": leaf.rows}))
            else:
                console.print(render_entry(leaf, opened.tariff.currency))
            return
        heads, periods = opened.heads(), [leaf.about["period"] for leaf in list_periods(opened)]
        found: dict[str, Any] = {"log": opened.name, "entries": len(opened), "tariff": opened.tariff.describe()}
    found |= {"periods": periods, "heads": len(heads), "last_head": heads[-1].time if heads else None}
    if json:
        typer.echo(dumps(found))
        return
    found |= {"periods": ", ".join(periods) or "none closed", "last_head": found["last_head"] or "none signed"}
    pairs = [(name.replace("_", " "), str(value)) for name, value in found.items()]
    console.print(render_pairs("Ledger", pairs))


@credit.command()
def head(
    ledger: Place,
    key: Key,
    publish: Annotated[
        Path | None, typer.Option(help="Append the signed head to this file, one per line.", dir_okay=False)
    ] = None,
    exchange: Annotated[bool, typer.Option(help="This key replaces the one that signed the last head.")] = False,
) -> None:
    """Sign the size and the root of the log as it is now, and print that as JSON.

    Publish heads where those who are paid can see them: whoever holds one can show that the log was rewritten later.

    For example: `imprint credit head -l credit.db --key credit.key --publish heads.jsonl`
    """
    from imprint.credit import Ledger

    with Ledger(ledger) as opened:
        typer.echo(dumps(opened.sign_head(key, publish, exchange=exchange).to_json()))


@credit.command()
def close(
    ledger: Place,
    period: PeriodName,
    until: Annotated[
        str | None, typer.Option(help="When the period ended, such as `2026-12-01T00:00:00Z`. Default: now.")
    ] = None,
    pot: Annotated[str | None, typer.Option(help="The amount shared by queries that have no pot of their own.")] = None,
) -> None:
    """Close a period: everything since the last one. Amounts are rounded to the smallest payable unit, and add up.

    For example: `imprint credit close 2026-11 -l credit.db --until 2026-12-01T00:00:00Z`
    """
    from imprint.credit import Ledger, close_period

    amount = None if pot is None else parse_amount(pot)
    with Ledger(ledger) as opened:
        leaf = close_period(opened, period, until=parse_time(until), pot=amount)
        console.print(render_entry(leaf, opened.tariff.currency))


@credit.command()
def statements(
    ledger: Place,
    period: PeriodName,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.", file_okay=False)],
    source: Annotated[
        list[str] | None, typer.Option(help="The id of a source. Repeat it for several. Default: all.")
    ] = None,
    terms: Annotated[
        Path | None,
        typer.Option(help="A TOML file of texts for the top of each page: payer, contract, contact …", exists=True),
    ] = None,
) -> None:
    """Write a statement for each source of a closed period: a page, tables, and proofs that its publisher can check.

    For example: `imprint credit statements 2026-11 -l credit.db --out statements --terms terms.toml`
    """
    from imprint.credit import Ledger, write_statements

    told = {name: str(text) for name, text in read_values(terms).items()} if terms is not None else None
    with show_progress(errors, "writing statements") as advance, Ledger(ledger) as opened:
        pages = write_statements(opened, period, out, sources=source or None, terms=told, progress=advance)
    console.print(f"{count_of(len(pages), 'statement')} written to [bold]{escape_markup(out)}[/bold]", soft_wrap=True)


@credit.command()
def erase(
    ledger: Place,
    entry: Annotated[list[int] | None, typer.Option(help="The number of an entry. Repeat it for several.")] = None,
    expired: Annotated[bool, typer.Option(help="Erase all queries whose retention has ended.")] = False,
) -> None:
    """Erase queries for good. Their entries stay and can be verified, but not disputed any more.

    For example: `imprint credit erase -l credit.db --expired`
    """
    from imprint.credit import Ledger

    if bool(entry) == expired:
        raise ConfigurationError("give either --entry or --expired.")
    with Ledger(ledger) as opened:
        count = opened.erase_expired() if expired else opened.erase(entry or ())
    console.print(f"{count_of(count, 'query', 'queries')} erased")
    if not expired and count < len(set(entry or ())):
        raise ConfigurationError("the other entries have no query: none was kept, or it was erased before.")


for command in (check, verify, dispute):
    credit.command()(command)
