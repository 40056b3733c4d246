"""Makes parts on a Ray cluster.

Task, data and sources are pickled once and put into Ray's object store, which brings them to every node once. What is
made goes to the folder of the parts, which all nodes must see. A worker does nothing but make its part, with a fixed
number of threads; how far it is, and its messages, go to a small actor that the driver asks twice a second.
"""

import contextlib
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from imprint.errors import ConfigurationError, MissingExtra, PlanError, StoreError, first_line
from imprint.runtime.progress import Advance
from imprint.simulation.executors.forwarding import forward
from imprint.simulation.executors.pickling import to_bytes
from imprint.simulation.executors.protocol import Outcome, Place, Recipe, Reports, check_counts, require_whole
from imprint.store.files import temporary_folder
from imprint.store.parts import Share

logger = logging.getLogger(__name__)
_POLL = 0.5  # seconds between two looks at what has ended, and between two reports of a worker
_VISIBLE = 30.0  # seconds until a network file system shows a new folder elsewhere
_ANSWER = 10.0  # seconds until a cluster answers
_STOPPING = 10.0  # seconds that workers get to keep their state when they are stopped


@dataclass(frozen=True)
class RayExecutor:
    """Makes parts on a Ray cluster; the folder of the result must be one that all of its nodes see.

    address: of the cluster; "auto" for the one that this machine belongs to, "local" to start one on this machine for
        the time being. Where `ray.init` was called before, that connection is used.
    parts: how many; by default as many as are there already, or as can be made at once. A simulation is resumed with as
        many as it was begun with.
    cpus: CPUs of a part, which is also its number of threads.
    gpus: GPUs of a part, to the first of which the task's model is moved; 0.5 for two parts on one.
    retries: how often a part is tried again whose worker died, or that failed for a reason that may pass.
    """

    address: str = "auto"
    parts: int | None = None
    cpus: int = 1
    gpus: float = 0
    retries: int = 2

    def __post_init__(self) -> None:
        check_counts(self.parts, self.retries)
        require_whole("cpus", self.cpus, 1)
        if not isinstance(self.gpus, int | float) or self.gpus < 0 or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise PlanError(f"gpus must be a whole number, or a share of one such as 0.5, got {self.gpus!r}.")

    @contextlib.contextmanager
    def open(self, recipe: Recipe, reports: Reports) -> Iterator["_RayPool"]:
        """Connect to the cluster and send the inputs; on the way out, stop what is under way."""
        if recipe.device == "cuda" and not self.gpus:
            raise PlanError(
                "the task's model is on a GPU, and the parts are given none: give gpus=1, or move the model to the CPU."
            )
        with _connected(self.address) as ray, _marked(recipe) as marker:
            inputs = ray.put(to_bytes(recipe.make, recipe.given, ray.cloudpickle))
            pool = _RayPool(ray, self, inputs, marker, reports)
            try:
                yield pool
            finally:
                pool.stop()


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield Ray, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("running parts on a Ray cluster", "cluster") from error
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        _reach(address)
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"no Ray cluster could be reached at {address!r} ({first_line(error)}): start one with `ray start --head`, "
            'give its address, or "local" for the processors of this machine.'
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Refuse at once an address at which nobody answers, which Ray would try for minutes."""
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()


@contextlib.contextmanager
def _marked(recipe: Recipe) -> Iterator[Path]:
    """Put a mark into the folder of the parts, by which workers know that they see the same folder."""
    folder, found = recipe.folder, recipe.folder.out.exists()
    with contextlib.ExitStack() as stack:
        stack.callback(folder.remove_empty, out=not found)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            marker = stack.enter_context(temporary_folder(folder.path))
        except OSError as error:
            raise StoreError(f"could not write to {folder.path}: {error.strerror or error}.") from error
        yield marker


class _RayPool:
    """A connection to a cluster, and the parts that are made on it."""

    def __init__(self, ray: Any, executor: RayExecutor, inputs: Any, marker: Path, reports: Reports) -> None:
        self._ray, self._executor, self._reports = ray, executor, reports
        self._running: dict[Any, Share] = {}
        self._inputs, self._marker = inputs, str(marker)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        board = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(_board_class())
        self._board = board.remote()
        self._make = ray.remote(
            num_cpus=executor.cpus, num_gpus=executor.gpus, max_retries=0, scheduling_strategy="SPREAD"
        )(_make_on_worker)
        if not self.slots():
            needs = f"{executor.cpus} CPUs" + (f" and {executor.gpus:g} GPUs" if executor.gpus else "")
            reports.log(
                logging.WARNING,
                __name__,
                f"no node of the Ray cluster has {needs}, which a part needs: waiting for one",
            )

    def _slots_by_node(self) -> list[int]:
        """Return how many parts fit on each node, if nothing else runs there."""
        needs = {"CPU": self._executor.cpus, "GPU": self._executor.gpus}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [min(int(node.get(kind, 0) / need) for kind, need in needs.items() if need) for node in nodes]

    def slots(self) -> int:
        return sum(self._slots_by_node())

    def start(self, share: Share) -> None:
        seen = (self._marker, _VISIBLE, str(Path.cwd()), tuple(sys.path))
        where = _Where(*seen, self._executor.cpus, self._executor.gpus > 0, self._count_sharing(share.of))
        self._running[self._make.remote(self._inputs, str(share), where, self._board)] = share

    def _count_sharing(self, parts: int) -> int:
        """Return how many of all parts share memory at most: that of a GPU, or that of the largest node."""
        gpus = self._executor.gpus
        fit = int(1 / gpus) if gpus else max(self._slots_by_node(), default=0)
        return max(1, min(fit, parts))

    def wait(self) -> list[Outcome]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL)
        self._listen()
        return [self._end(reference) for reference in ready]

    def _end(self, reference: Any) -> Outcome:
        """Return how a part ended."""
        share = self._running.pop(reference)
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # such as a node without this library
            return Outcome(share, f"its worker could not begin ({first_line(error)})", str(error))
        except self._ray.exceptions.RayError as error:  # the worker died, or its whole node
            return Outcome(share, f"its worker died ({first_line(error)})", str(error))
        return outcome

    def _listen(self) -> None:
        """Pass on what the workers have reported since the last time."""
        try:
            progress, messages = self._ray.get(self._board.take.remote(), timeout=_STOPPING)
        except self._ray.exceptions.RayError:  # its node is gone or busy: it is only progress
            return
        for text, (done, total) in progress.items():
            self._reports.advance(Share.parse(text), done, total)
        for kind, *message in messages:
            (self._reports.warn if kind == "warning" else self._reports.log)(*message)

    def stop(self) -> None:
        """Stop what is under way, so that it can be resumed."""
        for reference in self._running:
            self._ray.cancel(reference)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_STOPPING)
        self._listen()
        self._ray.kill(self._board)


def _board_class() -> type:
    """Return the actor that keeps what workers report; made here, it needs nothing of this library where it runs."""

    class Board:
        """Keeps how far each part is, and the messages of workers, until the driver takes them."""

        def __init__(self) -> None:
            self.progress: dict[str, tuple[int, int]] = {}
            self.messages: list[Any] = []

        def advance(self, part: str, done: int, total: int) -> None:
            self.progress[part] = (done, total)

        def send(self, message: Any) -> None:
            self.messages.append(message)

        def take(self) -> tuple[dict[str, tuple[int, int]], list[Any]]:
            taken, self.progress, self.messages = (self.progress, self.messages), {}, []
            return taken

        def settle(self) -> None:
            """Return once everything that the caller has sent before is here."""

    return Board


@dataclass(frozen=True)
class _Where:
    """What a worker is told about where it makes its part."""

    marker: str
    patience: float
    folder: str
    paths: tuple[str, ...]
    threads: int
    on_gpu: bool
    at_once: int


def _make_on_worker(packed: bytes, text: str, where: _Where, board: Any) -> Outcome:
    """Make a part, in a worker of Ray; return how it ended."""
    import ray

    share = Share.parse(text)
    with forward(lambda message: board.send.remote(message)):
        outcome = _attempt(packed, share, where, board, ray.cloudpickle)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(board.settle.remote(), timeout=_STOPPING)
    return outcome


def _attempt(packed: bytes, share: Share, where: _Where, board: Any, cloudpickle: Any) -> Outcome:
    torch.set_num_threads(where.threads)
    sys.path += [path for path in where.paths if path not in sys.path]  # where the user's modules are
    if Path(where.folder).is_dir():
        os.chdir(where.folder)  # where relative paths of the user's code lead
    try:
        _require_visible(Path(where.marker), where.patience)
        make, given = _load(packed, cloudpickle)
    except StoreError as error:  # as it would be the next time
        return replace(Outcome.of_error(share, error, traceback.format_exc()), final=True)
    try:
        place = Place("cuda" if where.on_gpu else None, where.at_once)
        make(str(share), place, progress=_report_to(board, str(share)), **given)
    except Exception as error:
        return Outcome.of_error(share, error, traceback.format_exc())
    return Outcome(share)


def _load(packed: bytes, cloudpickle: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function that makes a part, and what it is given."""
    try:
        make, given = cloudpickle.loads(packed)
    except Exception as error:  # such as a module of the user's that is not there
        raise StoreError(
            f"node {socket.gethostname()} cannot load the task and its data ({first_line(error)}): put what they "
            "import there, too."
        ) from error
    return make, given


def _require_visible(marker: Path, patience: float) -> None:
    """Refuse a machine that does not see the folder of the parts, by a mark which the driver has put there."""
    if not _is_visible(marker, patience):
        raise StoreError(
            f"node {socket.gethostname()} does not see {marker.parent}: give a folder that all nodes of the cluster "
            "see."
        )


def _is_visible(marker: Path, patience: float) -> bool:
    """Tell whether the driver's mark can be seen here; network file systems may show it late."""
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(OSError):
            if any(path.name == marker.name for path in marker.parent.iterdir()):  # listing brings a cache up to date
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1)


def _report_to(board: Any, part: str) -> Advance:
    """Return a progress function that reports to the board, now and then."""
    last = -_POLL

    def advance(done: int, total: int, /) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _POLL or done >= total:
            last = now
            board.advance.remote(part, done, total)

    return advance
