"""Scores through a serving engine: any OpenAI-compatible server whose `/v1/completions` echoes log-probabilities.

`RemoteReader` tests a server once, by the probes of an export under every adapter, and then asks for the log-likelihood
of every query under every adapter, many requests at a time. `read_remote` does both in one call.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imprint.errors import ImprintError, ReadoutError
from imprint.export.completions import Server, ServerGone
from imprint.export.peft import adapter_name
from imprint.export.reading import Scores, read
from imprint.export.record import BASE, ROUNDINGS, Export
from imprint.export.vllm import RANKS

_HEADS = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte")  # the last names of output heads and embeddings
_OFF = 0.1  # of what an adapter changes: an engine that is further off does not serve it
_SHOWN = 4


@dataclass(frozen=True)
class Query:
    """The tokens of a query up to the last one that counts, and their weights."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class EngineCheck:
    """A serving engine beside PyTorch, on the probes of an export.

    deviation: the largest difference of a log-likelihood, in nats. moves: the largest difference in what an adapter
    changes, relative to it; None for an export without probes of its adapters.
    """

    url: str
    adapters: int
    probes: int
    deviation: float
    moves: float | None

    def __str__(self) -> str:
        text = f"{self.url}: {self.adapters} adapters on {self.probes} probes, "
        text += f"log-likelihoods within {self.deviation:.1e} nats of PyTorch's"
        return text if self.moves is None else f"{text}, and what adapters change to a relative {self.moves:.1e}"


class RemoteReader:
    """Scores of the sources of an export, from a server that has its model and its adapters.

    at_once: requests under way at a time. timeout: seconds without an answer after which a request is sent again.
    retries: attempts after the first one, with growing pauses.
    load_from: the folder of the export as the server sees it: adapters that the server lacks are loaded from there.
    """

    def __init__(
        self,
        export: Export | str | os.PathLike[str],
        url: str,
        *,
        at_once: int = 16,
        timeout: float = 120.0,
        retries: int = 4,
        load_from: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.export = Export.open(export, "peft")
        if at_once < 1:
            raise ReadoutError(f"at_once must be at least 1, got {at_once}.")
        _refuse_layers(self.export)
        self.server = Server(url.rstrip("/"), timeout, retries, api_key)
        self._at_once, self._load_from = at_once, None if load_from is None else Path(load_from).absolute()
        self._finished: dict[tuple[str, Query], float] = {}  # of calls that failed, for the next ones
        self._checked: EngineCheck | None = None

    def check(self) -> EngineCheck:
        """Compare the server with PyTorch on the probes of the export; refuse one with another model or adapters."""
        self._checked = None
        self._find_adapters()
        paths, probes = self._paths(), _queries([self.export.probe_batch()])
        values = self._ask([(path, query) for path in paths for query in probes], {})
        found = torch.tensor(values, dtype=torch.float64).reshape(len(paths), len(probes))
        try:
            self.export.refuse_values(found[0], self.export.dtype)
        except ReadoutError as error:
            raise ReadoutError(
                f"{self.server.url} does not serve the model of this export: {error} Start it with serve.sh of the "
                f"export, in {self.export.dtype}."
            ) from error
        self._checked = self._compare(paths, found)
        return self._checked

    def scores(self, queries: Any) -> Scores:
        """Score completions under every adapter, once the server is known to be the right one.

        If the server fails, what was finished is kept: call this again, with the same queries, when it is back.
        """
        asked = _queries([batch for _, batch in self.export.batches(queries, torch.device("cpu"))])
        if self._checked is None:
            self.check()
        paths = self._paths()
        wanted = [(path, query) for path in paths for query in asked]
        finished = {key: self._finished[key] for key in wanted if key in self._finished}
        try:
            values = self._ask(wanted, finished)
        except BaseException as error:
            self._checked = None  # a server that comes back may be another one
            self._finished.update(finished)
            if not isinstance(error, ServerGone):
                raise
            raise ServerGone(
                f"{error} {sum(key in finished for key in wanted)} of {len(wanted)} log-likelihoods are finished and "
                "kept: call scores again on this reader when the server is back, and only the others are asked for."
            ) from error
        for key in wanted:
            self._finished.pop(key, None)
        table = torch.tensor(values, dtype=torch.float64).reshape(len(paths), len(asked))
        plus, minus = ([table[paths.index(path)] for path in ends] for ends in self._ends())
        return read(self.export, torch.stack(plus, 1), torch.stack(minus, 1))

    def _paths(self) -> list[str]:
        """Return every adapter of the export, the base adapter first."""
        plus, minus = self._ends()
        return list(dict.fromkeys([BASE, *(path for pair in zip(plus, minus, strict=True) for path in pair)]))

    def _ends(self) -> tuple[list[str], list[str]]:
        """Return both adapters of every source, by their folders."""
        sources = self.export.sources
        return [str(source.plus) for source in sources], [str(source.minus) for source in sources]

    def _find_adapters(self) -> None:
        """Refuse a server that lacks adapters, or have it load them."""
        served = self.server.models()
        if served is None:
            return  # the first request will tell
        lacking = [path for path in self._paths() if adapter_name(path) not in served]
        if self._load_from is not None:
            for path in lacking:
                self.server.load(adapter_name(path), str(self._load_from / path))
        elif lacking:
            names = ", ".join(adapter_name(path) for path in lacking[:_SHOWN]) + ", …" * (len(lacking) > _SHOWN)
            raise ReadoutError(
                f"{self.server.url} lacks {len(lacking)} adapters of the export ({names}); it serves "
                f"{', '.join(served[:_SHOWN])}{', …' * (len(served) > _SHOWN)}. Start it with serve.sh of the export, "
                "or give load_from=, the folder of the export as the server sees it, to have them loaded."
            )

    def _compare(self, paths: list[str], found: Tensor) -> EngineCheck:
        """Compare log-likelihoods of the probes, (adapters, probes), with PyTorch's; refuse other adapters."""
        export = self.export
        base = torch.tensor(export.probes["float32"], dtype=torch.float64)
        ends = export.probe_ends()
        if ends is None:
            deviation = float((found[0] - base).abs().max())
            return EngineCheck(self.server.url, len(paths), len(base), deviation, None)
        known = {BASE: base}
        for side, columns in zip(self._ends(), ends, strict=True):
            known.update(zip(side, columns.T, strict=True))
        expected = torch.stack([known[path] for path in paths])
        moved, wanted = found[1:] - found[0], expected[1:] - expected[0]
        served = torch.tensor(export.probes[export.dtype], dtype=torch.float64)
        rounding = max(export.rounding, float((served - base).square().mean().sqrt()))
        sizes = wanted.norm(dim=1)
        allowed = sizes.clamp(min=float(sizes.square().mean().sqrt()))
        errors = (moved - wanted).norm(dim=1)
        for path, error, size, limit in zip(paths[1:], errors, sizes, allowed, strict=True):
            if not float(error) <= _OFF * float(limit) + ROUNDINGS * rounding * len(base) ** 0.5:
                raise ReadoutError(
                    f"{self.server.url} does not serve the adapter {adapter_name(path)!r} of this export: it should "
                    f"change the log-likelihoods of the probes by {float(size):.3g}, and what it changes is "
                    f"{float(error):.3g} away from that. It is another adapter of this name, or the server leaves some "
                    "of its layers out."
                )
        relative = float((errors / allowed.clamp(min=1e-12)).max())  # where no adapter changes anything
        return EngineCheck(self.server.url, len(paths), len(base), float((found - expected).abs().max()), relative)

    def _ask(self, wanted: Sequence[tuple[str, Query]], finished: dict[tuple[str, Query], float]) -> list[float]:
        """Return the log-likelihood of every query under its adapter, many at a time; keep those that are finished."""
        stop = threading.Event()

        def ask(path: str, query: Query) -> None:
            values = self.server.log_probs(adapter_name(path), list(query.ids), stop) if len(query.ids) > 1 else []
            finished[path, query] = sum(w * v for w, v in zip(query.weights[1:], values, strict=True))

        todo = [key for key in dict.fromkeys(wanted) if key not in finished]
        _run([partial(ask, *key) for key in todo], self._at_once, stop)
        return [finished[key] for key in wanted]


def read_remote(export: Export | str | os.PathLike[str], url: str, queries: Any, **options: Any) -> Scores:
    """Score completions through a server; the options are those of `RemoteReader`, which can resume."""
    return RemoteReader(export, url, **options).scores(queries)


def _run(calls: list[Callable[[], None]], at_once: int, stop: threading.Event) -> None:
    """Run calls in threads; raise the first error, once those under way have ended and the others are dropped."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    errors = [error for future in done if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, ImprintError)), errors[0])


def _queries(batches: list[Any]) -> list[Query]:
    """Return the rows of batches without what follows the last token that counts, which a causal model does not see."""
    found = []
    for batch in batches:
        for ids, weights in zip(batch["input_ids"].tolist(), batch["weights"].tolist(), strict=True):
            end = max((position + 1 for position, weight in enumerate(weights) if position and weight), default=0)
            found.append(Query(tuple(ids[:end]), tuple(weights[:end])))
    return found


def _refuse_layers(export: Export) -> None:
    """Refuse adapters that engines are known to serve wrongly, or not at all."""
    for path, (rank, _, _) in export.layers.items():
        if path.rsplit(".", 1)[-1] in _HEADS:
            raise ReadoutError(
                f"{path!r} has an adapter, and it is an output head or an embedding: vLLM leaves adapters there out of "
                "the log-probabilities of prompts without saying so. Read this export with read_peft."
            )
        if rank > RANKS[-1]:
            raise ReadoutError(
                f"the adapter of {path!r} has rank {rank}, and vLLM serves at most {RANKS[-1]}: simulate with a "
                'smaller R in "lora:R", or read this export with read_peft.'
            )
