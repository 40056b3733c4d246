"""Prepares the digits demo for `imprint serve --demo`: a validated store, its ledger, its keys, in one folder.

Nothing is downloaded. The folder is made once, in some seconds; a second start serves what is there.
"""

import asyncio
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from imprint.benchmarking.settings import digits
from imprint.credit.ledger import Ledger
from imprint.credit.money import Tariff
from imprint.credit.periods import close_period
from imprint.credit.policy import Policy
from imprint.errors import ConfigurationError, ReliabilityWarning
from imprint.evaluation.together import Together
from imprint.evaluation.validating import validate
from imprint.keys import make_keys
from imprint.recording.reading import Recording
from imprint.serve.access import Access
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from imprint.simulation.runner import simulate
from imprint.sources import Sources
from imprint.store.reading import Store
from imprint.store.signing import sign_store
from imprint.task import Task

FOLDER = Path("imprint-serve-demo")
ADMIN, QUERY = "demo", "demo-query"
"""The names of the keys: that of the person who logs in, and that of programs."""
_CLOSED, _OPEN = 36, 12  # queries credited in a closed period, and after it
_TOGETHER = 6  # queries of a request
_INSIDE = 2  # sources whose documents are prepared: the one who mislabels, and another
_POLICY = Policy("demo", question="this_run")
_PRICE = 20_000  # micro-units: two cents a query
Log = Callable[[str], None]


@dataclass(frozen=True)
class Demo:
    """What the demo serves, and what a person needs to try it.

    examples: queries for the page, each with a caption.
    query_key, query_file: files for curl, with an API key and with a request.
    """

    task: Task
    store: Store
    settings: Settings
    examples: list[tuple[Any, str]]
    query_key: Path
    query_file: Path


def prepare(folder: Path, settings: Settings, log: Log = lambda text: None) -> Demo:
    """Make the demo in a folder, or open the one that is there."""
    if not os.path.lexists(folder):
        try:
            _make(folder, log)
        except OSError as error:
            raise ConfigurationError(
                f"the demo cannot be made in {folder}: {error.strerror or error}. Give another folder with --folder."
            ) from error
    elif not (folder / "query.json").is_file():
        raise ConfigurationError(f"{folder} is no folder of the demo: give another one with --folder, or remove it.")
    task = _load_task(folder)
    return Demo(
        task,
        _open_store(folder),
        _settle(folder, settings),
        _choose_examples(),
        folder / "query.key",
        folder / "query.json",
    )


def _settle(folder: Path, settings: Settings) -> Settings:
    """Return the settings with the demo's own places."""
    return replace(
        settings,
        ledger=str(folder / "credit.db"),
        access=str(folder / "access.db"),
        policy=folder / "policy.json",
        public_key=folder / "credit.key.pub",
        heads=folder / "heads.jsonl",
        statements=folder / "statements",
        documents=folder / "documents",
        signed_by=folder / "store.key.pub",
    )


def _open_store(folder: Path) -> Store:
    return Store(folder / "store", signed_by=folder / "store.key.pub")


def _load_task(folder: Path) -> Task:
    recording = Recording(folder / "run")
    model = digits.model()
    model.load_state_dict(recording.state(len(recording.steps)))
    return digits.task(model)


def _make(folder: Path, log: Log) -> None:
    """Make everything in a folder beside, and move it once it is complete."""
    making, runner = folder.with_name(f".{folder.name}-{os.getpid()}"), logging.getLogger(simulate.__module__)
    making.mkdir(mode=0o700, parents=True)
    runner.addFilter(_is_no_resumption)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReliabilityWarning)  # the pages say what may be wrong with a result
            _make_store(making, log)
            _make_ledger(making, log)
        _make_keys(making)
        making.rename(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    finally:
        runner.removeFilter(_is_no_resumption)


def _is_no_resumption(record: logging.LogRecord) -> bool:
    """Tell whether a message is no promise to resume what is removed here: the demo is made anew."""
    return not record.getMessage().startswith("stopped: ")


def _make_store(folder: Path, log: Log) -> None:
    setting = digits.load()
    log("training a small model on handwritten digits from twelve contributors, and recording the run")
    how = Together(digits.model, digits.task, setting.train, digits.TRAINING)
    recording = how.record(0, folder / "run")
    task, sources = _load_task(folder), setting.sources
    log("repeating the run without each contributor")
    store = simulate(task, setting.train, sources, run=recording, out=folder / "store", progress=False)
    log("removing some of them for real, to validate the effects")
    validate(store, setting.queries, progress=False)
    make_keys(folder / "store.key")
    sign_store(store, folder / "store.key")
    chosen = [setting.mislabeller, *(place for place in range(len(sources)) if place != setting.mislabeller)]
    for place in chosen[:_INSIDE]:
        log(f"looking inside {sources.names[place]}: repeating the run without each of its digits")
        _look_inside(folder, task, setting, sources, sources.ids[place], recording)


def _look_inside(
    folder: Path, task: Task, setting: digits.Digits, sources: Sources, source: str, run: Recording
) -> None:
    inside = sources.inside(source, None, len(setting.train[1]))
    place = folder / "documents" / quote(source, safe="")
    simulate(task, setting.train, inside, run=run, out=place, progress=False)


def _make_ledger(folder: Path, log: Log) -> None:
    """Credit some queries as a service does, close a period, and publish a signed head."""
    log("crediting a few dozen answers in a new ledger, and closing a period")
    (folder / "policy.json").write_text(json.dumps(_POLICY.to_json(), indent=2) + "\n", encoding="utf-8")
    make_keys(folder / "credit.key")
    with Ledger.create(folder / "credit.db", Tariff("EUR", per_query=_PRICE)) as ledger:
        service = Service(_load_task(folder), _open_store(folder), policy=_POLICY, ledger=ledger)
        queries = [_write_query(place) for place in range(_CLOSED + _OPEN)]
        try:
            _credit(service, queries[:_CLOSED], "closed")
            close_period(ledger, f"{datetime.now(UTC):%Y-%m}-demo")
            _credit(service, queries[_CLOSED:], "open")
        finally:
            service.close()
        ledger.sign_head(folder / "credit.key", folder / "heads.jsonl")


def _credit(service: Service, queries: list[Any], name: str) -> None:
    async def run() -> None:
        for start in range(0, len(queries), _TOGETHER):
            answered = await service.attribute(queries[start : start + _TOGETHER], divide=False)
            await service.credit(answered, caller=f"key:{QUERY}", key=f"{name}-{start}")

    asyncio.run(run())


def _make_keys(folder: Path) -> None:
    access = Access(str(folder / "access.db"))
    try:
        access.create(ADMIN, "admin")
        secret = access.create(QUERY, "query").secret
    finally:
        access.close()
    private = folder / "query.key"
    private.touch(mode=0o600)
    private.write_text(f"{secret}\n", encoding="utf-8")
    request = {"query": _write_query(0), "top": 3}
    (folder / "query.json").write_text(json.dumps(request) + "\n", encoding="utf-8")


def _write_query(place: int) -> dict[str, Any]:
    """Return a held-out digit as JSON: its pixels from 0, paper, to 16, ink. The model's own answer is attributed."""
    form = digits.form()
    pixels = torch.round(digits.load().queries[0][place] * form.scale + form.mean)
    return {"pixels": [int(pixel) for pixel in pixels]}


def _choose_examples() -> list[tuple[Any, str]]:
    """Return the first held-out picture of each digit."""
    labels = digits.load().queries[1].tolist()
    names = {8: "an 8"}
    return [(_write_query(labels.index(digit)), names.get(digit, f"a {digit}")) for digit in range(10)]
