"""Parts that an executor makes: what is made when, what is tried again, what is said, and what comes of it."""

import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from imprint import PartsError, Plan, PlanError, RayExecutor, Sources, Store, StoreError, Task, simulate
from imprint.errors import DataError, ReliabilityWarning
from imprint.simulation import sharing
from imprint.simulation.executors import Executor, InProcess, Outcome, Place, Recipe, Reports, on_ray, running
from imprint.simulation.executors.forwarding import Message, forward
from imprint.simulation.executors.pickling import to_bytes
from imprint.simulation.executors.running import Reporter
from imprint.simulation.sharing import make_part
from imprint.store.parts import PartsFolder, Share
from tests.simulation.killing import PLANS, Killed, Made, contents, data, dies_after, run, run_part, task

TANGENT = PLANS["tangent"]
Attempt = Callable[[Share, int], str | None]


def groups() -> Sources:
    return Sources.by_label([i % 6 for i in range(24)])


@dataclass
class Fake:
    """Makes parts in this process, as if it were several: some attempts fail, and parts end in another order.

    fails: what goes wrong at an attempt at a part, the first being 1; None if nothing does.
    """

    fails: Attempt = lambda share, attempt: None
    parts: int | None = 3
    retries: int = 2
    at_once: int = 2
    began: list[str] = field(default_factory=list)
    most: int = 0

    @contextmanager
    def open(self, recipe: Recipe, reports: Reports) -> Iterator["Fake"]:
        self.recipe, self.reports, self.under_way = recipe, reports, list[Share]()
        yield self

    def slots(self) -> int:
        return self.at_once

    def start(self, share: Share) -> None:
        self.began.append(str(share))
        self.under_way.append(share)
        self.most = max(self.most, len(self.under_way))

    def wait(self) -> list[Outcome]:
        share = self.under_way.pop()
        if failure := self.fails(share, self.began.count(str(share))):
            return [Outcome(share, failure, f"Traceback of {share}: {failure}", final=failure.startswith("final"))]

        def advance(done: int, total: int, /) -> None:
            self.reports.advance(share, done, total)

        try:
            self.recipe.make(str(share), Place(), progress=advance, **self.recipe.given)
        except Exception as error:
            return [Outcome.of_error(share, error, traceback.format_exc())]
        return [Outcome(share)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PAUSE", 0.0)


def test_parts_made_by_an_executor_are_the_store_of_one_run(made: Made, tmp_path: Path) -> None:
    for name, executor in {"in turn": InProcess(parts=3), "at once": Fake()}.items():
        store = run(tmp_path / name, TANGENT, executor=executor)
        assert contents(store.path) == contents(made(TANGENT))
        assert store.origin is not None and store.origin["task"] is not None


def test_no_more_parts_are_under_way_than_fit(tmp_path: Path) -> None:
    executor = Fake(parts=6)
    run(tmp_path / "store", TANGENT, executor=executor)
    assert executor.most == 2 and sorted(executor.began) == [f"{k}/6" for k in range(1, 7)]


def test_without_a_number_there_are_as_many_parts_as_fit_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    few = Fake(parts=None, at_once=2)
    run(tmp_path / "store", TANGENT, executor=few)
    assert sorted(few.began) == ["1/2", "2/2"]
    run_part(tmp_path / "begun", "2/3", TANGENT)
    more = Fake(parts=None, at_once=9)
    run(tmp_path / "begun", TANGENT, executor=more)
    assert sorted(more.began) == ["1/3", "2/3", "3/3"]
    run_part(tmp_path / "other", "2/3", TANGENT)
    with pytest.raises(StoreError, match="is divided into 3 parts, not 2"):
        run(tmp_path / "other", TANGENT, executor=Fake(parts=2))


def test_a_part_whose_worker_dies_is_tried_again(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = Fake(lambda share, attempt: "its worker died" if share.number == 2 and attempt < 3 else None)
    store = run(tmp_path / "store", TANGENT, executor=executor)
    assert contents(store.path) == contents(made(TANGENT))
    assert executor.began.count("2/3") == 3 and len(executor.began) == 5
    assert caplog.messages.count("part 2/3 is tried again, and resumes: its worker died") == 2


def test_what_failed_waits_a_little_while_others_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PAUSE", 0.3)
    executor = Fake(lambda share, attempt: "busy" if share.number == 1 and attempt == 1 else None, at_once=1)
    run(tmp_path / "store", TANGENT, executor=executor)
    assert executor.began == ["1/3", "2/3", "3/3", "1/3"]


def test_a_part_that_always_fails_is_reported_once_and_the_others_are_made(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Fake(lambda share, attempt: "OSError: a bad disk" if share.number == 2 else None)
    with pytest.raises(PartsError) as caught:
        run(tmp_path / "store", TANGENT, executor=executor)
    assert str(caught.value) == (
        "1 of 3 parts could not be made (2/3: OSError: a bad disk). The other 2 are finished and stay. Once the cause "
        f"is removed, make the same call again: it resumes what is in {tmp_path}/store."
    )
    assert caught.value.tracebacks == {"2/3": "Traceback of 2/3: OSError: a bad disk"}
    reported = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert reported == [
        "part 2/3 (sources 2, 3) failed, after 3 attempts: OSError: a bad disk\nTraceback of 2/3: OSError: a bad disk"
    ]
    files = sorted((tmp_path / "store" / "parts").rglob("imprints-*"))
    before = [path.stat().st_mtime_ns for path in files]
    assert len(files) == 4
    again = Fake()
    store = run(tmp_path / "store", TANGENT, executor=again)
    after = [store.path / path.relative_to(tmp_path / "store" / "parts").relative_to(path.parts[-3]) for path in files]
    assert [path.stat().st_mtime_ns for path in after] == before  # they were not written a second time
    assert contents(store.path) == contents(made(TANGENT))


def test_parts_that_fail_alike_show_one_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = Fake(lambda share, attempt: "final: the disk is full")
    with pytest.raises(PartsError, match=r"3 of 3 parts could not be made \(1/3, 2/3, 3/3: final: the disk is full\)"):
        run(tmp_path / "store", TANGENT, executor=executor)
    assert len(executor.began) == 3  # what is final is not tried again
    assert caplog.text.count("Traceback") == 1 and caplog.text.count("as part 2/3 did: final: the disk is full") == 2


def test_an_error_of_the_loss_names_the_part_and_shows_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = len(data()[0])

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) < count:
            raise OSError("no such thing")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(PartsError, match="no such thing"):
        run(tmp_path / "store", TANGENT, task=Task(task().model, loss), executor=InProcess(parts=2))
    assert 'raise OSError("no such thing")' in caplog.text


def test_what_every_part_would_refuse_is_refused_at_once(tmp_path: Path) -> None:
    executor = Fake()
    for wrong, error, words in (
        ({"sources": "all"}, Exception, "sources"),
        ({"plan": "fast"}, PlanError, "plan must be"),
        ({"note": {1, 2}}, StoreError, "note must be made of JSON values"),
        ({"out": None}, PlanError, "give it as out="),
    ):
        given: dict[str, Any] = {"task": task(), "data": data(), "sources": groups(), "out": tmp_path / "store"}
        with pytest.raises(error, match=words):
            simulate(**{**given, **wrong}, executor=executor)
    assert not executor.began and not (tmp_path / "store").exists()


def test_a_folder_begun_without_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "store", TANGENT, progress=dies_after(9))
    executor = Fake()
    with pytest.raises(StoreError, match="that was begun without parts"):
        run(tmp_path / "store", TANGENT, executor=executor)
    assert not executor.began


def test_a_finished_store_is_returned_if_it_is_the_same(made: Made, tmp_path: Path) -> None:
    first = run(tmp_path / "store", TANGENT, executor=InProcess(parts=2))
    executor = Fake()
    assert run(tmp_path / "store", TANGENT, executor=executor).path == first.path and not executor.began
    with pytest.raises(StoreError, match="already holds a store, made otherwise"):
        run(tmp_path / "store", Plan(steps=3, lr=0.2), executor=executor)


def test_a_merge_that_was_interrupted_is_finished(made: Made, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("imprint.simulation.sharing.merge", lambda *_, **__: pytest.fail("killed"))
    with pytest.raises(BaseException, match="killed"):
        run(tmp_path / "store", TANGENT, executor=Fake())
    monkeypatch.undo()
    with pytest.raises(PartsError, match="holds parts of something else"):
        run(tmp_path / "store", Plan(steps=3, lr=0.2), executor=InProcess(parts=3))
    assert contents(run(tmp_path / "store", TANGENT, executor=Fake()).path) == contents(made(TANGENT))


def test_an_automatic_plan_is_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "auto", lambda *_, **__: TANGENT)
    given: dict[str, Any] = {"task": task(), "data": data(), "sources": groups(), "out": tmp_path / "store"}
    fails = Fake(lambda share, attempt: "final: no" if share.number == 3 else None)
    with pytest.raises(PartsError):
        simulate(**given, plan="auto", progress=False, executor=fails)
    assert fails.recipe.given["plan"] == TANGENT
    monkeypatch.setattr(Plan, "auto", lambda *_, **__: pytest.fail("the plan is known"))
    assert simulate(**given, plan="auto", progress=False, executor=Fake()).manifest.plan == TANGENT


def test_interrupting_keeps_what_is_there(made: Made, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "store", TANGENT, executor=InProcess(parts=2), progress=dies_after(20, KeyboardInterrupt))
    assert contents(run(tmp_path / "store", TANGENT, executor=InProcess()).path) == contents(made(TANGENT))


def new_reporter(told: list[tuple[int, int]], of: int = 2, known: tuple[str, ...] = ()) -> Reporter:
    def tell(done: int, total: int, /) -> None:
        told.append((done, total))

    recipe = Recipe(print, {}, PartsFolder("store"), 6, "simulating", "sources", "cpu", str)
    found = Reporter(recipe, tell, known)
    found.expect(of)
    return found


def test_progress_adds_up_and_never_goes_back() -> None:
    told: list[tuple[int, int]] = []
    found = new_reporter(told)
    first, second = Share(1, 2).others()
    found.advance(first, 4, 10)
    assert told[-1] == (4, 20)  # the other part has not said how much it has to do
    found.advance(second, 1, 12)
    found.advance(first, 2, 10)  # tried again
    found.advance(first, 7, 10)
    assert told[-1] == (8, 22)
    found.finish(first)
    found.finish(second)
    assert told[-1] == (22, 22) and told == sorted(told)


def test_finished_parts_are_not_waited_for() -> None:
    told: list[tuple[int, int]] = []
    found = new_reporter(told, 4)
    shares = Share(1, 4).others()
    for share in shares[:2]:
        found.finish(share)
    found.advance(shares[2], 5, 10)
    assert told[-1] == (5, 20)


def test_what_all_workers_say_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    found = new_reporter([], known=("the user knows this",))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for message in ("a warning", "a warning", "the user knows this", "another"):
            found.warn("ReliabilityWarning", message)
        found.warn("NoSuchWarning", "of a user")
        found.warn("StoreError", "of no kind")
    assert [(each.category, str(each.message)) for each in seen] == [
        (ReliabilityWarning, "a warning"),
        (ReliabilityWarning, "another"),
        (UserWarning, "of a user"),
        (UserWarning, "of no kind"),
    ]
    for _ in range(2):
        found.log(logging.WARNING, "imprint.somewhere", "100% slower")
    assert caplog.messages == ["100% slower"]


def test_warnings_and_logs_are_forwarded_and_nothing_of_the_machinery() -> None:
    sent: list[Message] = []
    handlers = logging.getLogger().handlers
    with forward(sent.append):
        for _ in range(3):
            logging.getLogger("imprint.simulation").warning("falls back: %s", "no vmap")
        logging.getLogger("ray.worker").warning("of the machinery")
        logging.getLogger("mine").info("too quiet")
        warnings.warn("doubtful", ReliabilityWarning, stacklevel=1)
    assert sent == [
        ("log", logging.WARNING, "imprint.simulation", "falls back: no vmap"),
        ("warning", "ReliabilityWarning", "doubtful"),
    ]
    assert logging.getLogger().handlers is handlers


def test_what_cannot_be_pickled_is_named() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    lock = threading.Lock()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with lock:
            return model(batch[0]).square().sum(1)  # type: ignore[no-any-return]

    given = {"sources": groups(), "task": Task(task().model, loss)}
    with pytest.raises(
        DataError, match=r"task\.loss, which uses lock cannot be sent .* as it holds a lock .*: create it on first use"
    ):
        to_bytes(print, given, cloudpickle)
    with pytest.raises(DataError, match=r"data\[1\]\['rows'\] cannot be sent .* as it holds a generator"):
        to_bytes(print, {"data": [0, {"rows": (i for i in range(3))}]}, cloudpickle)
    make, again = cloudpickle.loads(to_bytes(print, {"task": task()}, cloudpickle))
    assert make is print and again["task"].names == task().names


@pytest.mark.parametrize("kind", [InProcess, RayExecutor])
def test_every_executor_checks_the_number_of_parts_and_of_retries(kind: Callable[..., Executor]) -> None:
    for name, least, refused in (("parts", 1, (0, -1, 1.5, "2", True)), ("retries", 0, (-1, None, "2", True))):
        for wrong in refused:
            with pytest.raises(PlanError, match=f"{name} must be a whole number of at least {least}, got {wrong!r}"):
                kind(**{name: wrong})
    assert kind(parts=None).parts is None and kind(parts=3, retries=0).parts == 3


def test_settings_of_ray_are_checked() -> None:
    for name, words in (
        ("cpus", "cpus must be a whole number of at least 1, got 1.5"),
        ("gpus", "gpus must be a whole number, or a share of one such as 0.5"),
    ):
        with pytest.raises(PlanError, match=words):
            RayExecutor(**{name: 1.5})  # type: ignore[arg-type]
    executor: Executor = RayExecutor(parts=8, gpus=0.5)
    recipe = Recipe(print, {}, PartsFolder("store"), 6, "simulating", "sources", "cuda", str)
    with (
        pytest.raises(PlanError, match="the parts are given none: give gpus=1"),
        RayExecutor().open(recipe, new_reporter([])),
    ):
        pass
    assert executor.parts == 8


def test_parts_on_one_machine_share_its_memory_and_go_where_their_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(sharing, "simulate_part", lambda part, task, **given: calls.append({"part": part, **given}))
    monkeypatch.setattr(sharing, "budget", lambda memory, device: 4 << 30)
    moved = task()
    monkeypatch.setattr(moved.model, "to", lambda device: calls.append({"to": device}))
    make_part("1/2", Place("cuda", at_once=4), task=moved, memory=None, device="cpu")
    assert calls == [{"to": "cuda"}, {"part": "1/2", "memory": 1 << 30, "device": None}]
    make_part("1/2", Place(), task=moved, memory="2GiB", device="cpu")
    assert calls[2:] == [{"part": "1/2", "memory": "2GiB", "device": "cpu"}]


@pytest.mark.parametrize(
    ("options", "node", "parts", "at_once"),
    [
        ({"gpus": 1}, {"CPU": 64, "GPU": 8}, 2, 1),
        ({"gpus": 1}, {"CPU": 64, "GPU": 8}, 20, 1),
        ({"gpus": 2}, {"CPU": 64, "GPU": 8}, 4, 1),
        ({"gpus": 0.5}, {"CPU": 64, "GPU": 8}, 20, 2),
        ({"gpus": 0.25}, {"CPU": 64, "GPU": 1}, 3, 3),
        ({}, {"CPU": 64}, 2, 2),
        ({}, {"CPU": 64}, 100, 64),
        ({"cpus": 8}, {"CPU": 64}, 20, 8),
        ({"cpus": 8}, {"CPU": 4}, 20, 1),  # no node has room yet
    ],
)
def test_memory_is_divided_by_the_parts_that_share_a_gpu_or_a_node(
    options: dict[str, Any], node: dict[str, float], parts: int, at_once: int
) -> None:
    ray = MagicMock()
    ray.nodes.return_value = [{"Alive": True, "Resources": node}, {"Alive": False, "Resources": {"CPU": 999}}]
    pool = on_ray._RayPool(ray, RayExecutor(**options), None, Path("mark"), new_reporter([]))
    pool.start(Share(1, parts))
    _, part, where, _ = ray.remote.return_value.return_value.remote.call_args.args
    assert part == f"1/{parts}" and where.at_once == at_once and where.on_gpu == ("gpus" in options)


def test_workers_find_a_store_to_repeat_at_its_address_and_not_in_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("IMPRINT_CACHE", str(tmp_path / "cache"))
    address, executor = f"file://{tmp_path}/bucket/news", Fake()
    simulate(task(), data(), groups(), TANGENT, out=address, progress=False)
    given: Any
    for number, given in enumerate((address, Store(address))):
        simulate(task(), data(), groups(), out=tmp_path / str(number), repeat=given, progress=False, executor=executor)
        assert executor.recipe.given["repeat"] == address


def test_workers_find_a_store_to_repeat_wherever_they_run(made: Made, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(made(TANGENT).parent)
    executor = Fake()
    run(tmp_path / "again", TANGENT, repeat=made(TANGENT).name, executor=executor)
    assert executor.recipe.given["repeat"] == str(made(TANGENT))
    assert contents(tmp_path / "again") == contents(made(TANGENT))
