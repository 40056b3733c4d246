"""What the service adds to reading the same batches in-process: with one client and with many, with and without credit.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/serve_load.py    # --postgres: in a private server
    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/serve_load.py --flat 10000    # memory over so many requests

A GPT-2 with random weights and twelve sources answers queries of one prompt and completion. A process of its own sends
them from threads that each wait for their answer, on this machine alone. Every round is first asked of the service,
which notes the batches that it made, and then reads the same queries in the same batches in-process: its ratio compares
both on a machine that others share. Figures are medians over rounds.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvicorn

import imprint
from imprint.attribution.scoring import Scorer
from imprint.credit import Ledger, Policy, Tariff
from imprint.serve import Access, Service, Settings, create_app
from imprint.serve.client import Client
from imprint.serve.running import bind, configure
from tests.credit.crediting import Server as Postgres

CONCURRENCY = (1, 4, 16)
SOURCES, WORDS, LENGTH = 12, 500, 48  # the last: tokens of a query
FEWEST = 6  # queries of a round: few, so that what else the machine does is the same with the service and without


@dataclass
class Round:
    """What one round took with the service and in-process: seconds, and those of the processor of this process.

    batches: the sizes of the batches that the service made. requests: milliseconds of each request by part.
    """

    served: float
    served_cpu: float
    batches: list[int]
    requests: list[dict[str, float]]
    alone: float = 0.0
    alone_cpu: float = 0.0


@dataclass
class Stage:
    """A service under test, and what it noted of its batches."""

    service: Service
    client: "Load"
    batches: list[int] = field(default_factory=list)


class Load:
    """A process that sends queries from several threads."""

    def __init__(self, url: str, key: str) -> None:
        self._pipe, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_send_load, args=(there, url, key))
        self._process.start()
        assert self._pipe.recv() == "ready"

    def send(self, queries: list[Any], threads: int, credit: bool) -> tuple[float, list[dict[str, float]]]:
        """Send each query in a request of its own; return the seconds, and the milliseconds of each request."""
        self._pipe.send((queries, threads, credit))
        seconds, requests = self._pipe.recv()
        return seconds, requests

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _send_load(pipe: Connection, url: str, key: str) -> None:
    """Do what `Load.send` asks for, until there is no more."""
    pipe.send("ready")
    client = Client(url, key)
    while (given := pipe.recv()) is not None:
        pipe.send(_send_from_threads(client, *given))


def _send_from_threads(
    client: Client, queries: list[Any], threads: int, credit: bool
) -> tuple[float, list[dict[str, float]]]:
    left, requests, lock = iter(queries), list[dict[str, float]](), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                query = next(left, None)
            if query is None:
                return
            began = time.perf_counter()
            answer = client.attribute(query, credit=credit)
            spent = 1000 * (time.perf_counter() - began)
            with lock:
                requests.append({**answer.milliseconds, "latency": spent})

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began, requests


def make_transformer(folder: Path, layers: int, width: int, parameters: str) -> tuple[imprint.Task, imprint.Store]:
    """Make a language model of random weights, and imprints of twelve sources by one step."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from imprint import language

    words = {f"w{place}": place for place in range(WORDS)}
    split = Tokenizer(models.WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, unk_token="w0", model_max_length=2 * LENGTH)
    sizes = {"vocab_size": WORDS, "n_positions": 2 * LENGTH, "n_embd": width, "n_layer": layers, "n_head": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    task = language.task(model, tokenizer, parameters=parameters)
    texts = [" ".join(_draw_words(LENGTH)) for _ in range(2 * SOURCES)]
    documents = language.Documents(texts, tokenizer)
    sources = documents.sources([f"publisher-{place % SOURCES:02}" for place in range(len(texts))])
    plan = imprint.Plan(engine="tangent", steps=1, lr=1e-4)
    store = imprint.simulate(task, documents.columns, sources, plan, out=folder / "store", progress=False)
    return task, store


def _draw_words(count: int) -> list[str]:
    return [f"w{place}" for place in torch.randint(1, WORDS, (count,)).tolist()]


def ask_transformer() -> dict[str, str]:
    return {"prompt": " ".join(_draw_words(LENGTH // 2)), "completion": " " + " ".join(_draw_words(LENGTH // 2))}


@contextmanager
def serving(task: imprint.Task, store: imprint.Store, policy: Policy, ledger: str, folder: Path) -> Iterator[Stage]:
    """Serve a store on this machine, crediting in a new ledger."""
    name = uuid.uuid4().hex
    settings = Settings(port=0, metrics="", access=str(folder / f"{name}.access"), rate=1e6, queue=1024)
    access, noted = Access(settings.access_place), list[int]()
    with Ledger.create(ledger, Tariff("EUR", per_query=2_000)) as opened:
        service = Service(
            task,
            store,
            policy=policy,
            ledger=opened,
            settings=settings,
            observe=lambda count, seconds: noted.append(count),
        )
        app = create_app(settings, service, access)
        bound = bind("127.0.0.1", 0)
        server = uvicorn.Server(configure(app, settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        thread.start()
        client = Load(url, access.create("load", "query").secret)
        try:
            yield Stage(service, client, noted)
        finally:
            client.close()
            server.should_exit = True
            thread.join()
            access.close()


def run_round(stage: Stage, scorer: Scorer, queries: list[Any], threads: int, credit: bool) -> Round:
    """Ask the service, then read the same batches in-process."""
    form = stage.service.form
    stage.batches.clear()
    before = time.process_time()
    served, requests = stage.client.send(queries, threads, credit)
    found = Round(served, time.process_time() - before, list(stage.batches), requests)
    parsed = [form.read(query) for query in queries]
    began, before, first = time.perf_counter(), time.process_time(), 0
    for size in found.batches:
        scorer.attribute(form.join(parsed[first : first + size]), size, [(place, place + 1) for place in range(size)])
        first += size
    found.alone, found.alone_cpu = time.perf_counter() - began, time.process_time() - before
    assert first == len(queries)
    return found


def describe(rounds: list[Round]) -> dict[str, Any]:
    """Return medians over rounds, or over requests where they are about these, in milliseconds."""
    requests = [request for each in rounds for request in each.requests]
    latency = sorted(request["latency"] for request in requests)
    parts = {name: statistics.median(request[name] for request in requests) for name in ("queued", "read", "credited")}
    http = statistics.median(request["latency"] - request["total"] for request in requests)
    rest = statistics.median(
        request["total"] - request["queued"] - request["read"] - request["credited"] for request in requests
    )
    return {
        "added": statistics.median(each.served / each.alone - 1 for each in rounds),
        "added_cpu": statistics.median(each.served_cpu / each.alone_cpu - 1 for each in rounds),
        "alone_per_query": statistics.median(1000 * each.alone / len(each.requests) for each in rounds),
        "batch": statistics.mean(size for each in rounds for size in each.batches),
        "p50": latency[len(latency) // 2],
        "p99": latency[int(0.99 * (len(latency) - 1))],
        **parts,
        "rest": rest,
        "http": http,
    }


def measure_forward(task: imprint.Task, batch: Any) -> float:
    """Return the milliseconds of a plain forward pass of one query."""
    task.model.eval()
    times = []
    with torch.no_grad():
        for _ in range(20):
            began = time.perf_counter()
            task.model(input_ids=batch["input_ids"])
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


@contextmanager
def opened_database(folder: Path, postgres: bool) -> Iterator[str]:
    """Give a place for a ledger: a file, or a database of a private server."""
    if not postgres:
        yield str(folder / "credit.db")
        return
    folder.chmod(0o711)
    server = Postgres(folder / "pg")
    try:
        yield server.make_database()
    finally:
        server.stop()


def compare(arguments: argparse.Namespace, folder: Path, place: str) -> dict[str, Any]:
    task, store = make_transformer(folder, arguments.layers, arguments.width, arguments.parameters)
    policy, scorer = Policy("benchmark", question="expected", fallback="by_size"), Scorer(task, store)
    found: dict[str, Any] = {}
    with serving(task, store, policy, place, folder) as stage:
        queries = [ask_transformer() for _ in range(2 * max(CONCURRENCY))]
        found["forward"] = measure_forward(task, stage.service.form.read(queries[0]))
        print(f"a plain forward pass of one query takes {found['forward']:.1f} ms", flush=True)
        rounds: dict[tuple[int, bool], list[Round]] = {}
        for turn, threads, credit in product(range(arguments.rounds + 1), CONCURRENCY, (False, True)):
            made = run_round(stage, scorer, queries[: max(FEWEST, 2 * threads)], threads, credit)
            if turn:  # the first warms up
                rounds.setdefault((threads, credit), []).append(made)
    for (threads, credit), of_case in rounds.items():
        name = f"{threads} at once, {'credited' if credit else 'not credited'}"
        found[name] = describe(of_case)
        shown = "  ".join(f"{key} {value:.3g}" for key, value in found[name].items())
        print(f"{name}: {shown}", flush=True)
    return found


def read_memory() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def measure_memory(folder: Path, count: int) -> dict[str, Any]:
    """Return the resident memory of a process that serves many requests of a small model, in MB."""
    from imprint.serve import demo

    torch.manual_seed(0)
    made = demo.prepare(folder / "demo", Settings())
    queries = [query for query, _ in made.examples]
    policy = Policy("benchmark", question="this_run")
    sizes = []
    with serving(made.task, made.store, policy, str(folder / "flat.db"), folder) as stage:
        for start in range(0, count, 1000):
            stage.client.send([queries[place % 10] for place in range(1000)], 16, credit=start % 2000 == 0)
            sizes.append(read_memory())
            print(f"after {start + 1000:,} requests: {sizes[-1]:.1f} MB", flush=True)
    return {"megabytes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--parameters", default="*", help="those that imprints are of, such as transformer.h.5.*")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--postgres", action="store_true", help="credit in PostgreSQL instead of SQLite")
    parser.add_argument("--flat", type=int, default=0, help="requests over which memory is measured instead")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="imprint-load-") as name:
        folder = Path(name)
        if arguments.flat:
            found = measure_memory(folder, arguments.flat)
        else:
            with opened_database(folder, arguments.postgres) as place:
                found = compare(arguments, folder, place)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
