"""Implements `imprint serve`: answers queries over HTTP, with pages that people read."""

import logging
import shlex
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

import imprint
from imprint.cli.commands.credit_options import read_policy
from imprint.cli.commands.options import DeviceName, SignedBy
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import errors, escape_markup, redirect_prints
from imprint.display import count_of, for_terminal
from imprint.errors import ConfigurationError, ReliabilityWarning
from imprint.runtime.threads import set_threads
from imprint.validation.record import find_verdict

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    from imprint.credit.policy import Policy
    from imprint.serve import Access, Service, Settings
    from imprint.serve.demo import Demo
    from imprint.store.reading import Store
    from imprint.task import Task
    from imprint.validation.verdict import Verdict

Lines = list[tuple[str, str]]
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

StorePlace = Annotated[Path | None, typer.Argument(help="The store's folder, or its address in a bucket.")]
TaskName = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE.py:NAME]",
        help="The task that the store was made with. Required unless it is a built-in setting, because code named "
        "in a store is never loaded automatically.",
    ),
]
Demonstrate = Annotated[bool, typer.Option("--demo", help="Serve the digits demo, with keys and a ledger of its own.")]
DemoFolder = Annotated[
    Path | None,
    typer.Option(help="The folder of the demo, made if it is missing. Default: imprint-serve-demo.", file_okay=False),
]
Host = Annotated[str | None, typer.Option(help="The address to listen on. Default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="The port; 0 takes any that is free. Default: 8080.")]
MetricsPlace = Annotated[
    str | None,
    typer.Option(help="Where Prometheus reads metrics, or `none`. Default: 127.0.0.1:9464.", metavar="HOST:PORT"),
]
LedgerPlace = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        "-l",
        help="Credit queries here: a SQLite file, or a URL such as `postgresql://user@host/name`. The environment "
        "variable IMPRINT_SERVE_LEDGER keeps a password off the command line.",
    ),
]
PolicyFile = Annotated[
    Path | None, typer.Option(help="Who is credited: a TOML or JSON file. Goes with --ledger.", dir_okay=False)
]
KeysPlace = Annotated[
    str | None,
    typer.Option(help="The database of keys. Default: beside the ledger, or `imprint-access.db` in this folder."),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file of settings. The environment (IMPRINT_SERVE_…) overrides it, and flags override both.",
        dir_okay=False,
    ),
]


def serve(
    context: typer.Context,
    store: StorePlace = None,
    task: TaskName = None,
    demo: Demonstrate = False,
    folder: DemoFolder = None,
    host: Host = None,
    port: Port = None,
    metrics: MetricsPlace = None,
    ledger: LedgerPlace = None,
    policy: PolicyFile = None,
    access: KeysPlace = None,
    device: DeviceName = None,
    signed_by: SignedBy = None,
    config: SettingsFile = None,
) -> None:
    """Answer queries over HTTP, credit them, and show pages that publishers and auditors read in a browser.

    POST a query to /v1/attributions and get the effect of removing each source, with its error. Requests need an API
    key: make one with `imprint access create`. SIGTERM and Ctrl+C finish what was accepted, and stop. docs/serving.md
    lists all settings, and says how to run a service.

    For example:

    - `imprint serve --demo`, to look around: nothing else is needed

    - `imprint serve runs/news my_model.py:task --port 8000`

    - `imprint serve runs/news my_model.py:task --ledger credit.db --policy policy.toml --config serve.toml`
    """
    _check_arguments(store, task, demo, folder)
    from imprint.serve import Settings
    from imprint.serve.logs import start_logging

    given: dict[str, Any] = {"host": host, "port": port, "ledger": ledger, "policy": policy, "access": access}
    given |= {"metrics": metrics, "signed_by": signed_by}
    out = sys.stdout
    with redirect_prints():
        if demo:
            found = _prepare_demo(folder, Settings.load(config, **given))
            start_logging()
            _run(found.task, found.store, found.settings, found, out)
            return
        assert store is not None
        settings = Settings.load(config, **given)
        opened, loaded = _open(context, store, task, device, settings)
        start_logging()
        _run(loaded, opened, settings, None, out)


def _check_arguments(store: Path | None, task: str | None, demo: bool, folder: Path | None) -> None:
    if demo and (store is not None or task is not None):
        raise ConfigurationError("--demo brings its own store and task: give either --demo or a store.")
    if not demo and store is None:
        raise ConfigurationError("give the store to serve, such as runs/news, or --demo to look around.")
    if folder is not None and not demo:
        raise ConfigurationError("--folder is that of the demo: it goes with --demo.")


def _open(
    context: typer.Context, place: Path, task: str | None, device: str | None, settings: "Settings"
) -> "tuple[Store, Task]":
    """Open a store and load its task, as `imprint attribute` does."""
    store = imprint.Store(place, signed_by=settings.signed_by)
    given = Experiment(task=task, device=device)
    if task is None:
        given = merge_with_store(given, store, ("task",), context)
    return store, Objects(given).task


def _prepare_demo(folder: Path | None, settings: "Settings") -> "Demo":
    from imprint.benchmarking.settings import digits
    from imprint.serve.demo import FOLDER, prepare

    set_threads(digits.model())
    if settings.ledger is not None or settings.access is not None:
        raise ConfigurationError(
            "the demo has a ledger and keys of its own: leave --ledger, --policy and --access out."
        )
    return prepare(folder or FOLDER, settings, lambda text: errors.print(f"  {escape_markup(text)} …", style="dim"))


def _run(task: "Task", store: "Store", settings: "Settings", demo: "Demo | None", out: TextIO) -> None:
    """Put the service together and serve until a signal; close everything in turn."""
    from imprint.credit.ledger import Ledger
    from imprint.serve import Access, Service, create_app
    from imprint.serve.metrics import Metrics
    from imprint.serve.running import bind, end_process_in_time, run
    from imprint.serve.service import LOCK_SECONDS

    warnings.simplefilter("ignore", ReliabilityWarning)  # each answer has its own
    with ExitStack() as stack:
        access = Access(settings.access_place)
        stack.callback(access.close)
        ledger = None
        if settings.ledger is not None:
            ledger = stack.enter_context(Ledger(settings.ledger, wait=LOCK_SECONDS))
        rules = None if settings.policy is None else read_policy(settings.policy)
        figures = Metrics()
        service = Service(task, store, policy=rules, ledger=ledger, settings=settings, observe=figures.observe_batch)
        stack.callback(service.close)
        app = create_app(settings, service, access, metrics=figures, examples=None if demo is None else demo.examples)
        bound = bind(settings.host, settings.port)
        address = _format_address(bound)

        def announce() -> None:
            lines = _describe(service, access, address, app)
            _announce(lines + ([] if demo is None else _explain_demo(demo, access, address)), out)

        service.warm_up()
        run(app, settings, bound, announce, lambda: end_process_in_time(settings))


def _announce(lines: Lines, out: TextIO) -> None:
    """Say what is served, where, and what is missing."""
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        typer.echo(f"{name:>{width}}  {for_terminal(text)}", file=out)
    logging.getLogger("imprint.serve").info("started", extra={"fields": {"version": imprint.__version__}})


def _format_address(bound: "socket.socket") -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _describe(service: "Service", access: "Access", address: str, app: "FastAPI") -> Lines:
    """Return what a service serves, and from where."""
    store, settings = service.store, service.settings
    from imprint.credit.tables import describe
    from imprint.serve.answering import DESCRIPTIONS

    verdict = find_verdict(store, service.task.measure_name)
    ledger = "none: nothing is credited" if service.ledger is None else describe(service.ledger.engine)
    lines = [
        ("store", f"{store.place}: {count_of(len(store), 'source')}, {store.question.replace('_', ' ')}"),
        ("answers", DESCRIPTIONS[service.answering.answers_from]),
        ("validation", "not validated: see `imprint validate`" if verdict is None else str(verdict).split(": ")[0]),
        ("address", address),
        (
            "metrics",
            f"http://{settings.metrics.rpartition(':')[0]}:{app.state.exporter.port}/metrics"
            if settings.metrics
            else "none",
        ),
        ("ledger", ledger),
        *_describe_policy(service.policy, verdict, service.ledger is not None),
        ("keys", _describe_keys(access, settings)),
    ]
    if settings.host not in _LOOPBACK and not settings.https:
        lines.append(("caution", "other machines reach this address without encryption: keys can be read on the way."))
    return lines


def _describe_policy(policy: "Policy | None", verdict: "Verdict | None", credits_queries: bool) -> Lines:
    """Return which policy divides queries, and whether anybody can be credited under it."""
    if policy is None:
        return []
    text = f"{policy.name}, version {policy.version}"
    if (reason := policy.find_lacking_validation(None if verdict is None else verdict.outcome)) is not None:
        instead = {None: "nobody is credited", "by_size": "shares are by size", "equal": "all shares are equal"}
        text = f"{text}: {instead[policy.fallback]} ({reason})"
    if not credits_queries:
        text = f"{text}; it only shows how queries would be divided, as there is no ledger"
    return [("policy", text)]


def _describe_keys(access: "Access", settings: "Settings") -> str:
    from imprint.credit.tables import hide_password

    place = hide_password(settings.access_place)
    if count := len(access.list()):
        return f"{place}: {count_of(count, 'key')}"
    return f"{place}: none yet. Make one: imprint access create NAME --role query --access {place}"


def _explain_demo(demo: "Demo", access: "Access", address: str) -> Lines:
    """Return how to log in and how to ask; the link is used up by the first who opens it."""
    from imprint.serve.demo import ADMIN

    request = f'-H "Content-Type: application/json" -d @{shlex.quote(str(demo.query_file))}'
    key = f'-H "Authorization: Bearer $(cat {shlex.quote(str(demo.query_key))})"'
    return [
        ("log in", f"{address}/login/{access.make_link(ADMIN)} (once; start again for another link)"),
        ("ask", f"curl {key} {request} {address}/v1/attributions"),
    ]
