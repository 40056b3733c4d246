"""The service without HTTP: reads queries of concurrent requests from one store, and credits them.

One thread computes (`Batcher`); the database is written in others, so that the next batch is read meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.attribution.scoring import Scorer
from imprint.batches import Batch, leaves, map_tensors
from imprint.credit.drafting import Draft, draft_entries
from imprint.credit.ledger import Ledger, Receipt
from imprint.credit.payloads import encode_query
from imprint.credit.policy import Policy
from imprint.errors import ConfigurationError, DataError, ImprintError, StoreError
from imprint.forms import Form
from imprint.serve.batching import Batcher
from imprint.serve.seen import Seen
from imprint.serve.settings import Settings
from imprint.store.manifest import MANIFEST
from imprint.store.reading import Store
from imprint.task import Task
from imprint.validation.record import read_validation

if TYPE_CHECKING:
    from imprint.language import TokenAttribution

logger = logging.getLogger("imprint.serve")
T = TypeVar("T")
_WASTE = 1.5  # times the numbers in a batch that padding may add


@dataclass(frozen=True)
class Answered:
    """What was found for the queries of one request.

    batches: the queries as they were read, each as a batch of one.
    answers: what is attributed, for people.
    drafts: how the policy would divide each query; empty if the service has none, or was not asked for it.
    queued, read: seconds.
    """

    result: Attribution
    batches: tuple[Batch, ...]
    answers: tuple[str, ...]
    drafts: tuple[Draft, ...] = ()
    queued: float = 0.0
    read: float = 0.0


class Service:
    """A store that answers: attributes queries, credits them, and remembers what it has seen.

    form: how JSON becomes a query; by default the task's own.
    policy, ledger: how and where queries are credited.
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
        self.task, self.store, self.form, self.policy, self.ledger = task, store, found, policy, ledger
        self.settings = settings or Settings()
        self.seen = Seen(read_validation(store))
        self._scorer, self._inside = Scorer(task, store), dict[str, Scorer]()
        self._batcher: Batcher[Batch, Answered] = Batcher(
            self._read,
            most=self.settings.batch,
            waiting=self.settings.queue,
            fits=_fit_together,
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
        self, queries: Sequence[Any], *, deadline: float | None = None, divide: bool = True
    ) -> Answered:
        """Attribute the queries of a request, given as JSON values.

        divide: also find how the policy would divide them; crediting does that by itself.
        """
        began = time.monotonic()
        timeout = self.settings.deadline if deadline is None else deadline
        batches = await asyncio.to_thread(self._parse, queries)
        found = await self._batcher.submit(batches, timeout - (time.monotonic() - began))
        answered = replace(found.result, queued=found.waited, read=found.seconds)
        if self.policy is not None and divide:
            answered = replace(answered, drafts=await asyncio.to_thread(self._divide, answered.result))
        self.seen.add(answered.result)
        return answered

    def _parse(self, queries: Sequence[Any]) -> list[Batch]:
        batches = []
        for place, query in enumerate(queries):
            try:
                batches.append(self.form.read(query))
            except DataError as error:
                raise DataError(str(error) if len(queries) == 1 else f"query {place}: {error}") from error
        return batches

    def _read(self, requests: Sequence[Sequence[Batch]]) -> list[Answered]:
        """Read the queries of several requests in one batch."""
        given = [batch for request in requests for batch in request]
        joined = self.form.join(given)
        filled = self.form.fill(self._ask, joined)
        if filled is not joined:
            given = [_take_row(filled, row) for row in range(len(given))]
        ends = list(accumulate(map(len, requests), initial=0))
        spans = list(pairwise(ends))
        results = self._scorer.attribute(filled, len(given), spans)
        answers = [self.form.answer(batch, 0) for batch in given]
        return [
            Answered(result, tuple(given[first:last]), tuple(answers[first:last]))
            for result, (first, last) in zip(results, spans, strict=True)
        ]

    def _ask(self, inputs: Tensor) -> Any:
        with torch.no_grad(), self.task.evaluating():
            return self.task.call(lambda model, given: model(given), self.task.state(), inputs.to(self.task.device))

    def _divide(self, result: Attribution) -> tuple[Draft, ...]:
        assert self.policy is not None
        count = len(result)
        names = [f"{place}" for place in range(count)]
        return tuple(draft_entries(result, self.policy, [None] * count, names, [None] * count))

    async def credit(self, answered: Answered, *, caller: str, key: str) -> Receipt:
        """Credit the queries of a request; the same caller and key again return what was credited then."""
        return await asyncio.to_thread(self._credit, answered, caller, key)

    def _credit(self, answered: Answered, caller: str, key: str) -> Receipt:
        if self.ledger is None or self.policy is None:
            raise ConfigurationError("this service has no ledger: nothing can be credited.")
        days = self.settings.retention_days
        return self.ledger.credit(
            answered.result,
            self.policy,
            payloads=[encode_query(batch) for batch in answered.batches],
            retention=None if days is None else timedelta(days=days),
            caller=caller,
            key=key,
        )

    def warm_up(self) -> None:
        """Read the example of the form once, so that the first query need not wait for what torch prepares."""

        def read() -> None:
            self._read([[self.form.read(self.form.example)]])

        try:
            asyncio.run(self.run(read))
        except ImprintError as error:
            logger.warning("the example of the task's form cannot be read: %s", error)

    async def run(self, function: Callable[[], T]) -> T:
        """Return what a function returns that is run in the computing thread, in turn with the readouts."""
        return await self._batcher.run(function)

    async def words(self, query: Mapping[str, str]) -> "TokenAttribution":
        """Attribute the words of a completion; of language models alone."""
        from imprint.language import LanguageTask, token_scores

        task = self.task
        if not isinstance(task, LanguageTask):
            raise ConfigurationError("only the words of language models can be attributed.")
        self.form.read(query)  # refuses what is no query
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
        known = self._inside.get(source)
        if known is None:
            store = Store(place)
            if vars(store.manifest.request.data) != vars(self.store.manifest.request.data):
                raise StoreError(f"the documents in {place} are not those of this store's training data.")
            known = self._inside[source] = Scorer(self.task, store)
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


def _fit_together(batch: Sequence[Batch], more: Sequence[Batch]) -> bool:
    """Tell whether queries of different lengths may be padded to one: not if most of the work would be padding."""
    sizes = [sum(leaf.numel() for leaf in leaves(each)) for each in (*batch, *more)]
    return bool(len(sizes) * max(sizes) <= _WASTE * sum(sizes))


def _take_row(batch: Batch, row: int) -> Batch:
    return map_tensors(lambda tensor: tensor[row : row + 1], batch)
