"""The service without HTTP: reads queries of concurrent requests from one store, and credits them.

One thread computes (`Batcher`). The ledger is read and written in a few others, so that the next batch is read
meanwhile, and so that a ledger that is locked stalls nothing but crediting.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import torch

from imprint.attribution.result import Attribution
from imprint.attribution.scoring import Scorer
from imprint.batches import Batch
from imprint.credit.drafting import Draft, draft_entries
from imprint.credit.ledger import Ledger, Receipt
from imprint.credit.payloads import encode_query
from imprint.credit.policy import Policy
from imprint.errors import ConfigurationError, DataError, StoreError, first_line
from imprint.forms import Form, NumbersForm
from imprint.serve.answering import Answering
from imprint.serve.batching import Batcher
from imprint.serve.query_statistics import QueryStatistics
from imprint.serve.reading import fit_together, read_queries
from imprint.serve.recalling import describe_asked, recall_answers, recall_result
from imprint.serve.settings import Settings
from imprint.serve.workers import Unanswered, Workers
from imprint.store.manifest import MANIFEST
from imprint.store.reading import Store
from imprint.task import Task
from imprint.validation.record import read_validation

if TYPE_CHECKING:
    from imprint.language import TokenAttribution

logger = logging.getLogger("imprint.serve")
T = TypeVar("T")
_CREDITING = 4  # threads: the log has one writer at a time, the others prepare their entries or look requests up
_FINDING_SECONDS, _CREDITING_SECONDS = 5.0, 20.0  # after which whoever credits is told that the outcome is unknown
LOCK_SECONDS = 10
"""How long the ledger of a service should wait for another writer: `Ledger(place, wait=LOCK_SECONDS)`."""
_OPEN = 4  # stores of the documents inside sources that are kept open


@dataclass(frozen=True)
class Answered:
    """What was found for the queries of one request.

    batches: the queries as they were read, each as a batch of one; empty where they were not read again.
    answers: what is attributed, for people; None where that is not known any more.
    drafts: how the policy would divide each query; empty if the service has none, or was not asked for it.
    queued, read: seconds.
    asked: the queries as they were sent, by which a request that credits them is known when it comes again.
    """

    result: Attribution
    batches: tuple[Batch, ...]
    answers: tuple[str | None, ...]
    drafts: tuple[Draft, ...] = ()
    queued: float = 0.0
    read: float = 0.0
    asked: tuple[Any, ...] = ()


class CreditUnanswered(Exception):
    """The ledger did not answer in time: it is unknown whether something was, or still will be, credited."""


class Credited(NamedTuple):
    """What a request is answered with that was credited, now or before, its entries, and their policy."""

    answered: Answered
    receipt: Receipt
    policy: Policy


class Service:
    """A store that answers: attributes queries, credits them, and keeps statistics of them.

    form: how JSON becomes a query; by default the task's own.
    policy, ledger: how and where queries are credited. Open the ledger with wait=LOCK_SECONDS.
    observe: is told of every batch: how many queries it had, and the seconds that reading it took.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        form: Form | None = None,
        policy: Policy | None = None,
        ledger: Ledger | None = None,
        settings: Settings | None = None,
        observe: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        found = form or task.form
        if found is None:
            raise ConfigurationError(
                "this task does not say how JSON becomes a query: give it a form, such as Task(..., "
                "form=imprint.NumbersForm((8, 8), classes=10)); of a language model, give language.task its tokenizer."
            )
        if policy is not None:
            policy.check_question(store.question)
        self.task, self.store, self.policy, self.ledger = task, store, policy, ledger
        self.form: Form = replace(found, dtype=_find_dtype(task)) if isinstance(found, NumbersForm) else found
        self.settings = settings or Settings()
        self.statistics = QueryStatistics(read_validation(store))
        self._scorer, self._inside = Scorer(task, store), OrderedDict[str, Scorer]()
        self.answering = Answering(self._scorer.reader, self.form)
        if isinstance(self.form, NumbersForm):
            self.form.check(self.answering.ask)
        if ledger is not None and policy is not None:
            ledger.check(self._scorer.describe(), policy)
        self._crediting = Workers("credit", _CREDITING, self.settings.queue)
        self._batcher: Batcher[Batch, Answered] = Batcher(
            self._read,
            most=self.settings.batch,
            waiting=self.settings.queue,
            fits=fit_together,
            observe=observe,
        )

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The sources, with their sizes and what is known of them."""
        store = self.store
        about = [vars(each) for each in store.about] or [{}] * len(store)
        known = zip(store.source_ids, store.source_names, store.source_sizes, about, strict=True)
        return [{"id": id, "name": name, "size": size, **more} for id, name, size, more in known]

    @property
    def depth(self) -> int:
        """How many queries wait or are being read."""
        return self._batcher.depth

    @property
    def alive(self) -> bool:
        """Whether queries are read: the thread that does is there, and the service is not shutting down."""
        return self._batcher.alive

    async def attribute(
        self, queries: Sequence[Any], *, caller: str = "", deadline: float | None = None, divide: bool = True
    ) -> Answered:
        """Attribute the queries of a request, given as JSON values.

        caller: who takes turns with others.
        divide: also find how the policy would divide them; crediting does that by itself.
        """
        began = time.monotonic()
        timeout = self.settings.deadline if deadline is None else deadline
        batches = await asyncio.to_thread(self._parse, queries)
        found = await self._batcher.submit(batches, timeout - (time.monotonic() - began), caller)
        answered = replace(found.result, queued=found.waited, read=found.seconds, asked=tuple(queries))
        return await asyncio.to_thread(self._conclude, answered, divide)

    def _conclude(self, answered: Answered, divide: bool) -> Answered:
        """Take what was read into account, and divide it."""
        self.statistics.add(answered.result, answered.batches)
        if self.policy is None or not divide:
            return answered
        return replace(answered, drafts=self._divide(answered.result))

    def _parse(self, queries: Sequence[Any]) -> list[Batch]:
        batches = []
        for place, query in enumerate(queries):
            try:
                batches.append(self.form.read(query))
            except DataError as error:
                raise DataError(str(error) if len(queries) == 1 else f"query {place}: {error}") from error
        return batches

    def list_warnings(self, queries: Sequence[Any]) -> list[str]:
        """Return what to know of the queries of a request themselves, which were read before."""
        if len(queries) == 1:
            return list(self.form.warnings(queries[0]))
        return [f"query {place}: {text}" for place, query in enumerate(queries) for text in self.form.warnings(query)]

    def _read(self, requests: Sequence[Sequence[Batch]]) -> list[Answered]:
        """Read the queries of several requests."""
        found = read_queries(self._scorer, self.form, self.answering.ask, requests, self._batcher.check_wanted)
        return [
            Answered(result, queries, tuple(self.form.answer(query, 0) for query in queries))
            for result, queries in found
        ]

    def _divide(self, result: Attribution) -> tuple[Draft, ...]:
        assert self.policy is not None
        count = len(result)
        names = [f"{place}" for place in range(count)]
        return tuple(draft_entries(result, self.policy, [None] * count, names, [None] * count))

    async def recall(self, queries: Sequence[Any], *, caller: str, key: str) -> Credited | None:
        """Return what the same request was credited with before, from the ledger; None if it is new.

        Ask before queries are read that will be credited: refused if too many requests wait to be credited.
        """
        self._crediting.require_room()
        return await self._wait_for_ledger(_FINDING_SECONDS, self._recall, queries, caller, key)

    async def credit(self, answered: Answered, *, caller: str, key: str) -> Credited:
        """Credit the queries of a request; if somebody has just credited the same one, return what was credited."""
        return await self._wait_for_ledger(_CREDITING_SECONDS, self._credit, answered, caller, key)

    async def _wait_for_ledger(self, timeout: float, function: Callable[..., T], *given: object) -> T:
        try:
            return await self._crediting.run(function, *given, timeout=timeout)
        except Unanswered as error:
            logger.error("the ledger did not answer within %g s", timeout)
            raise CreditUnanswered from error

    def _require_ledger(self) -> tuple[Ledger, Policy]:
        if self.ledger is None or self.policy is None:
            raise ConfigurationError("this service has no ledger: nothing can be credited.")
        return self.ledger, self.policy

    def _recall(self, queries: Sequence[Any], caller: str, key: str) -> Credited | None:
        ledger, _ = self._require_ledger()
        receipt = ledger.find(describe_asked(queries), len(queries), caller=caller, key=key)
        return None if receipt is None else self._recall_receipt(ledger, receipt)

    def _recall_receipt(self, ledger: Ledger, receipt: Receipt) -> Credited:
        answers = recall_answers(ledger, receipt.entries, self.form)
        result, policy = recall_result(receipt.entries, self.store), ledger.policy(receipt.entries[0].about["policy"])
        return Credited(Answered(result, (), tuple(answers)), receipt, policy)

    def _credit(self, answered: Answered, caller: str, key: str) -> Credited:
        ledger, policy = self._require_ledger()
        days = self.settings.retention_days
        receipt = ledger.credit(
            answered.result,
            policy,
            payloads=[encode_query(batch) for batch in answered.batches],
            retention=None if days is None else timedelta(days=days),
            caller=caller,
            key=key,
            asked=describe_asked(answered.asked),
        )
        return self._recall_receipt(ledger, receipt) if receipt.repeated else Credited(answered, receipt, policy)

    def warm_up(self) -> None:
        """Read the example of the form once, so that the first query need not wait for what torch prepares."""

        def read() -> None:
            self._read([[self.form.read(self.form.example)]])

        try:
            asyncio.run(self._batcher.run(read))
        except Exception as error:  # of the model too: queries may do better than the example
            logger.warning("the example of the task's form cannot be read: %s", first_line(error))

    async def run(self, function: Callable[[], T]) -> T:
        """Return what a function returns that is run in the computing thread, in turn with the readouts."""
        return await self._batcher.run(function, self.settings.deadline)

    async def words(self, query: Mapping[str, str]) -> "TokenAttribution":
        """Attribute the words of a completion; of language models alone."""
        from imprint.language import LanguageTask, token_scores

        task = self.task
        if not isinstance(task, LanguageTask):
            raise ConfigurationError("only the words of language models can be attributed.")
        await asyncio.to_thread(self.form.read, query)  # refuses what is no query
        prompt, completion = query["prompt"], query["completion"]
        return await self.run(lambda: token_scores(task, self.store, prompt, completion, task.tokenizer))

    def find_documents(self, source: str) -> Path | None:
        """Return the store of the documents inside a source; None if none was prepared."""
        folder = self.settings.documents
        place = None if folder is None else folder / quote(source, safe="")
        return place if place is not None and (place / MANIFEST).is_file() else None

    async def documents(self, source: str, batch: Batch) -> Attribution:
        """Attribute one query to the documents inside a source, from the store that was prepared for it."""
        place = self.find_documents(source)
        if place is None:
            raise StoreError(f"no store of the documents inside {source} was prepared.")
        return await self.run(lambda: self._open_documents(source, place).attribute(batch, 1)[0])

    def _open_documents(self, source: str, place: Path) -> Scorer:
        """Return what reads the documents inside a source; the latest few are kept, with their imprints."""
        known = self._inside.pop(source, None)
        if known is None:
            store = Store(place)
            if vars(store.manifest.request.data) != vars(self.store.manifest.request.data):
                raise StoreError(f"the documents in {place} are not those of this store's training data.")
            while len(self._inside) >= _OPEN:  # before another one is opened, which takes a share of the memory left
                self._inside.popitem(last=False)
            known = Scorer(self.task, store)
        self._inside[source] = known
        return known

    def probe_ledger(self) -> None:
        """Read the size of the ledger, if there is one; fails if it cannot be reached."""
        if self.ledger is not None:
            len(self.ledger)

    def find_problems(self) -> list[str]:
        """Return why queries cannot be answered now; nothing if they can."""
        problems = [] if self.alive else ["the readout has stopped"]
        if self.store.is_outdated():
            problems.append("the store was changed since it was opened: restart the service")
        return problems

    def close(self, timeout: float | None = None) -> None:
        """Finish what was accepted, and accept no more."""
        self._batcher.close(timeout)
        self._crediting.close()


def _find_dtype(task: Task) -> torch.dtype:
    """Return the type of the numbers that a model computes with."""
    return next(each.dtype for each in task.model.parameters() if each.is_floating_point())
