"""Captured readouts give the scores of plain ones, or notice that they do not; on a CPU with a recorder of Python."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Reader, ReadoutError, Sources, Store, Task, TaskError, attribute, simulate
from imprint.attribution.scoring import Scorer
from imprint.compat import without_values
from imprint.data import Data
from imprint.readout import captured
from imprint.readout.kernels import ReadoutName
from imprint.runtime.cuda_graphs import MadeInPlace, Recorder, Unrepeatable, without_collection
from imprint.task import Batch
from imprint.validation.witnesses import read_effects
from tests.readout.reading import columns, new_model, simulated
from tests.simulation.removals import SOURCES, HandMadeRun, make_data, make_model, make_plan, make_task, removing_engine
from tests.zoo import ZOO

KNOB = {"scale": 1.0}  # what a graph does not see
Compute = Callable[[], Tensor]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Fake:
    """Repeats computations by Python, with the knob as it was when they were recorded."""

    def __init__(self) -> None:
        self.rehearsed = self.recorded = self.repeated = 0
        self.spoil: Callable[[Tensor], Tensor] = lambda scores: scores

    def rehearse(self, compute: Compute) -> Tensor:
        self.rehearsed += 1
        with without_values(), Unrepeatable(torch.device("cpu")), MadeInPlace():
            return compute()

    def record(self, compute: Compute) -> Compute:
        self.recorded += 1
        then = dict(KNOB)

        def repeat() -> Tensor:
            self.repeated += 1
            now = dict(KNOB)
            KNOB.update(then)
            try:
                with without_values():
                    return self.spoil(compute().clone())
            finally:
                KNOB.update(now)

        return repeat


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(captured, "recorder_for", lambda device: made)
    monkeypatch.setitem(KNOB, "scale", 1.0)
    return made


def plain(task: Task, store: Store, queries: Any, **options: Any) -> Tensor:
    return Reader(task, store, capture=False, **options).scores(queries)


def turned(model: nn.Module, batch: Batch) -> Tensor:
    """A measurement that depends on a value of Python."""
    return KNOB["scale"] * model(batch[0])[:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("readout", ["jvp", "central", "literal"])
def test_a_block_is_captured_when_it_is_read_again(readout: ReadoutName, task: Task, store: Store, fake: Fake) -> None:
    reader = Reader(task, store, readout=readout, step=1e-3)
    for seed, recorded in ((1, 0), (2, 1), (3, 1), (4, 1)):
        found, queries = reader.scores(columns(5, seed)), columns(5, seed)
        assert torch.equal(found, plain(task, store, queries, readout=readout, step=1e-3))
        assert fake.recorded == recorded
    assert fake.repeated == 3 and not reader.warnings


def test_removals_are_captured_too(fake: Fake) -> None:
    with removing_engine():
        run = HandMadeRun.of(make_model())
        store = simulate(make_task(), make_data(), SOURCES, make_plan(), run=run, progress=False)
        reader = Reader(make_task(), store, capture=True)
        for seed in range(4):
            queries = columns(7, seed, torch.float64)
            expected = plain(make_task(), store, queries)
            torch.testing.assert_close(reader.scores(queries), expected, rtol=1e-12, atol=1e-12)
    assert reader.readout == "removed" and fake.repeated == 3


def test_gradients_are_not_captured(task: Task, store: Store, fake: Fake) -> None:
    reader = Reader(task, store, readout="gradient")
    assert torch.equal(reader.scores(columns(5, 1)), reader.scores(columns(5, 1)))
    assert fake.rehearsed == 0


def test_every_shape_has_a_graph_and_the_least_used_gives_way(task: Task, store: Store, fake: Fake) -> None:
    reader = Reader(task, store)
    for rows in [*range(1, 9), *range(1, 9)]:
        reader.scores(columns(rows, 1))
    assert fake.recorded == 8
    reader.scores(columns(1, 2))
    for _ in range(2):
        reader.scores(columns(9, 2))  # in place of the graph of two rows
    assert fake.recorded == 9 and fake.repeated == 10
    reader.scores(columns(1, 3))
    assert fake.recorded == 9
    for seed in range(3):
        assert torch.equal(reader.scores(columns(2, seed)), plain(task, store, columns(2, seed)))
    assert fake.recorded == 10


def test_a_graph_is_dropped_when_imprints_have_moved_and_given_up_the_third_time(
    task: Task, store: Store, fake: Fake
) -> None:
    reader, expected = Reader(task, store), plain(task, store, columns(5, 1))

    def move() -> None:
        kept = reader._imprints._kept
        kept.update({at: ({name: u.clone() for name, u in loaded[0].items()}, None) for at, loaded in kept.items()})

    for _ in range(5):
        for _ in range(3):
            assert torch.equal(reader.scores(columns(5, 1)), expected)
        move()
    assert fake.recorded == 3 and fake.repeated == 6


def test_imprints_that_are_not_kept_are_read_plainly(task: Task, store: Store, fake: Fake) -> None:
    reader = Reader(task, store)
    reader._imprints._room = 0
    for _ in range(3):
        reader.scores(columns(5, 1))
    assert fake.rehearsed == 0


def test_graphs_get_a_quarter_of_the_memory_and_what_needs_more_is_read_plainly(
    task: Task, store: Store, fake: Fake
) -> None:
    queries = columns(500, 1)
    small, plainly = (Reader(task, store, memory="400kB", capture=capture) for capture in (None, False))
    assert small._captured.room == 100_000 and plainly._captured.room == 0
    assert small.fit(queries, 500) < plainly.fit(queries, 500)
    assert small.chunks(queries, 500)[0][1] <= plainly.chunks(queries, 500)[0][1]
    for _ in range(3):
        small.scores(queries)
    assert fake.rehearsed == 0
    for _ in range(3):
        small.scores(columns(2, 1))
    assert fake.recorded == 1


def test_repetitions_are_compared_ever_less_often(
    task: Task, store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    difference = captured._difference
    monkeypatch.setattr(captured, "_difference", lambda *of: compared.append(fake.repeated) or difference(*of))  # type: ignore[func-returns-value]
    reader = Reader(task, store)
    for _ in range(21):
        reader.scores(columns(5, 1))
    assert compared == [0, 1, 2, 4, 8, 16]  # the first one before the graph is made, with plain scores


def test_a_model_that_does_not_repeat_itself_is_noticed_and_read_plainly(store: Store, fake: Fake) -> None:
    task = Task.classifier(new_model(), measure=turned)
    reader, queries = Reader(task, store, capture=True), columns(5, 1)
    for _ in range(6):
        reader.scores(queries)  # plainly, and five times by a graph
    KNOB["scale"] = 3.0
    stale = [torch.equal(reader.scores(queries), plain(task, store, queries)) for _ in range(4)]
    assert stale == [False, False, True, True]  # the 6th, 7th, 8th, and none
    assert fake.repeated == 8
    (warning,) = reader.warnings
    assert "does not repeat itself" in warning and "0.67 of the largest" in warning
    assert "Up to 3 readouts before were not compared" in warning and "capture=False" in warning


def test_a_call_that_finds_graphs_stale_is_read_again(store: Store, fake: Fake) -> None:
    task = Task.classifier(new_model(), measure=turned)
    half, queries = len(store) // 2, columns(5, 1)
    reader = Reader(task, store, capture=True)
    blocks = [(0, half), (half, len(store))]
    reader.chunks = lambda batch, count: blocks  # type: ignore[method-assign]
    for _ in range(2):
        reader.scores(queries)
    for _ in range(5):
        reader.block(*blocks[0], queries, 5)  # whose graph is thereby at its 6th repetition, the other at its first
    KNOB["scale"] = 3.0
    torch.testing.assert_close(reader.scores(queries), plain(task, store, queries), rtol=1e-6, atol=1e-6)
    assert reader.stale


class Turned(nn.Module):
    """A model that depends on a value of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = new_model()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = KNOB["scale"] * self.inner(x)
        return logits


def test_an_attribution_that_finds_graphs_stale_is_made_again_and_counts_that(fake: Fake) -> None:
    task, queries, calls = Task.classifier(Turned(), measure="margin"), columns(60, 1), list[tuple[int, int]]()
    store = simulated(task)
    plainly = Reader(task, store, capture=False)

    def turn(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 7:
            KNOB["scale"] = 3.0

    result = attribute(task, store, queries, batch_size=5, progress=turn)
    torch.testing.assert_close(result.scores, plainly.scores(queries), rtol=1e-6, atol=1e-6)
    assert any("does not repeat itself" in warning for warning in result.warnings)
    assert len(calls) == 24
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (2 * 60 * len(store), 2 * 60 * len(store))


def test_parts_of_a_batch_are_read_again_when_a_later_one_finds_graphs_stale(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, queries, checks = Task.classifier(Turned(), measure="margin"), columns(60, 1), list[int]()
    store = simulated(task)
    scorer, plainly = Scorer(task, store), Reader(task, store, capture=False)
    monkeypatch.setattr(scorer.reader, "fit", lambda batch, count: 5)

    def turn() -> None:
        checks.append(len(checks))
        if len(checks) == 8:  # before the seventh of twelve parts
            KNOB["scale"] = 3.0

    found = scorer.read(queries, 60, turn)
    torch.testing.assert_close(found.scores, plainly.scores(queries), rtol=1e-6, atol=1e-6)
    assert scorer.reader.stale and len(checks) == 1 + 2 * 12
    scorer.read(queries, 60, turn)
    assert len(checks) == 1 + 2 * 12 + 1 + 12  # what was stale before is not read again


def test_effects_are_read_again_when_a_later_batch_finds_graphs_stale(fake: Fake) -> None:
    task, some = Task.classifier(Turned(), measure="margin"), [columns(5, seed) for seed in range(12)]
    store = simulated(task)
    plainly = Reader(task, store, capture=False)

    class Turning(list[tuple[int, Batch]]):
        def __iter__(self) -> Iterator[tuple[int, Batch]]:
            for number, each in enumerate(super().__iter__()):
                KNOB["scale"] = 3.0 if number == 6 else KNOB["scale"]
                yield each

    found = read_effects(task, [store], Turning((5, each) for each in some))
    expected = torch.cat([plainly.scores(each) for each in some]).double() / -store.n
    torch.testing.assert_close(torch.from_numpy(found[0]), expected, rtol=1e-6, atol=1e-7)


def last_logit(model: nn.Module, batch: Batch) -> Tensor:
    """A measurement that sees how long the batch is."""
    return model(input_ids=batch["input_ids"], use_cache=False).logits[:, -1, 5]  # type: ignore[no-any-return]


def test_queries_of_a_measurement_of_the_users_own_are_not_padded(fake: Fake) -> None:
    task, store = simulated_language("gpt2", dtype=torch.float32)
    reader = Reader(task, store, measure=last_logit, capture=True)
    for length in (9, 9, 9, 11, 11):
        expected = plain(task, store, prompt(length, length), measure=last_logit)
        torch.testing.assert_close(reader.scores(prompt(length, length)), expected)
    assert fake.recorded == 2


def test_a_graph_that_does_not_give_plain_scores_is_never_used(
    task: Task, store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "pad_batch", lambda batch: (2 * batch[0], batch[1]))
    reader = Reader(task, store)
    for _ in range(3):
        assert torch.equal(reader.scores(columns(5, 1)), plain(task, store, columns(5, 1)))
    assert (fake.rehearsed, fake.recorded) == (1, 0)


class Autocast(nn.Module):
    """A model that computes in half precision, with weights and outputs in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logits: Tensor = self.inner(x)
        return logits.float()


class Mixed(Autocast):
    """A float64 model with outputs that were rounded to float32."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits.float().double()


@pytest.mark.parametrize(
    ("dtype", "kind", "options", "padding", "is_rounding"),
    [
        (torch.float64, nn.Sequential, {}, 1e-6, False),
        (torch.float64, nn.Sequential, {}, 1e-10, True),
        (torch.float64, nn.Sequential, {"readout": "central"}, 1e-6, False),
        (torch.float64, Mixed, {}, 1e-6, True),
        (torch.float64, Mixed, {}, 1e-3, False),
        (torch.float32, nn.Sequential, {}, 1e-3, False),
        (torch.float32, nn.Sequential, {}, 1e-5, True),
        (torch.float32, nn.Sequential, {"readout": "central", "step": 1e-2}, 1e-3, True),  # as large as its rounding
        (torch.float32, nn.Sequential, {"readout": "central", "step": 1e-2}, 0.1, False),
        (torch.float32, Autocast, {}, 1e-3, True),
        (torch.float32, Autocast, {}, 0.1, False),
    ],
)
def test_padding_may_change_scores_by_no_more_than_rounding(
    dtype: torch.dtype,
    kind: type[nn.Module],
    options: dict[str, Any],
    padding: float,
    is_rounding: bool,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Task.classifier(kind(new_model(dtype)), measure="margin")
    store, queries = simulated(task, Plan(engine="trajectories", steps=2, lr=0.1)), columns(5, 1, dtype)
    monkeypatch.setattr(task, "pad_batch", lambda batch: (batch[0] * (1 + padding), batch[1]))
    reader, expected = Reader(task, store, **options), plain(task, store, queries, **options)
    for _ in range(3):
        found = reader.scores(queries)
    assert fake.recorded == is_rounding and not reader.warnings
    assert torch.equal(found, expected) != is_rounding


@pytest.fixture
def lower_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("lower_precision")
@pytest.mark.parametrize(("padding", "is_rounding"), [(1e-3, True), (0.1, False)])
def test_padding_may_change_scores_by_more_where_matrix_products_use_tf32(
    padding: float, is_rounding: bool, task: Task, store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "pad_batch", lambda batch: (batch[0] * (1 + padding), batch[1]))
    reader = Reader(task, store)
    for _ in range(3):
        reader.scores(columns(5, 1))
    assert fake.recorded == is_rounding


class Remembers(nn.Module):
    """A model that keeps a table for the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = new_model(), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.linspace(0, 1, len(x), device=x.device)
        return self.inner(x) + self.table[: len(x), None] * 0  # type: ignore[no-any-return]


def test_what_a_graph_reads_lives_as_long_as_it_does(fake: Fake) -> None:
    task = Task.classifier(Remembers())
    reader = Reader(task, simulated(task, Plan(engine="trajectories", steps=2, lr=0.1)))
    for _ in range(3):
        reader.scores(columns(5, 1))
    table = weakref.ref(task.replica.table)
    reader.scores(columns(40, 1))
    assert task.replica.table is not table() and table() is not None


def test_copies_between_devices_are_refused() -> None:
    there = torch.ones(3, device="meta")
    with Unrepeatable(torch.device("meta")), pytest.raises(ReadoutError, match="a CUDA graph cannot repeat"):
        torch.ones(3).to(there.device)


@pytest.mark.parametrize(
    ("found", "expected", "apart"),
    [
        ([1.0, 4.0], [1.0, 4.0], 0.0),
        ([1.0, 4.0], [1.4, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-9, 0.0], [0.0, 0.0], torch.inf),
        ([torch.nan, torch.inf], [torch.nan, torch.inf], 0.0),
        ([torch.nan, 2.0], [torch.nan, 4.0], 0.5),
        ([-torch.inf, 1.0], [torch.inf, 1.0], torch.inf),
        ([0.0, 1.0], [torch.nan, 1.0], torch.inf),
        ([torch.nan, 1.0], [0.0, 1.0], torch.inf),
    ],
)
def test_differences_are_relative_to_the_largest_score(found: Any, expected: Any, apart: float) -> None:
    given = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert captured._difference(*given) == pytest.approx(apart)


def test_scores_that_are_not_finite_are_read_plainly(task: Task, store: Store, fake: Fake) -> None:
    reader, queries = Reader(task, store), columns(5, 1)
    for _ in range(3):
        expected = reader.scores(queries)
    fake.spoil = lambda scores: scores * torch.nan
    assert torch.equal(reader.scores(queries), expected)  # the third repetition, which is not compared
    assert fake.repeated == 3 and not reader.warnings


def test_only_measurements_of_the_library_are_captured_unasked(
    store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captures(task: Task, **options: Any) -> bool:
        before, reader = fake.recorded, Reader(task, store, **options)
        for _ in range(3):
            reader.scores(columns(5, 1))
        return fake.recorded > before

    known, own = Task.classifier(new_model()), Task.classifier(new_model(), measure=turned)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert captures(known) and captures(Task.classifier(new_model(), measure="margin"))
    assert not captures(own) and captures(own, capture=True)
    assert not captures(Task(new_model(), loss=loss)) and not captures(known, measure=turned)
    assert not captures(known, capture=False)
    monkeypatch.setenv("IMPRINT_CAPTURE", "0")
    assert not captures(known) and captures(known, capture=True)
    monkeypatch.delenv("IMPRINT_CAPTURE")
    known.measure = turned
    assert not captures(known)


class Warm(nn.Module):
    """A model with a plain setting, which graphs do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = new_model(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        KNOB["scale"] = self.temperature
        return self.inner(x) / KNOB["scale"]  # type: ignore[no-any-return]


def test_a_changed_setting_of_a_module_drops_its_graphs(fake: Fake) -> None:
    task = Task.classifier(model := Warm())
    store = simulated(task)
    reader = Reader(task, store)
    plainly = Reader(task, store, capture=False)
    for temperature in (1.0, 2.0):
        model.temperature = temperature
        for _ in range(5):
            assert torch.equal(reader.scores(columns(5, 1)), plainly.scores(columns(5, 1)))
    assert fake.recorded == 2 and fake.repeated == 8 and not reader.warnings


class Reads(nn.Module):
    """A model that looks at its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = new_model()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x if x.sum() > -1e9 else -x)
        return found


class Masks(Reads):
    """A model whose shapes depend on its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found + x[x > 1e9].sum()


class Constant(Reads):
    """A model that makes a tensor of a number, as transformers do for masks."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return torch.where(found > 1e9, torch.tensor(0.5, device=x.device, dtype=x.dtype), found)


def test_a_model_that_makes_a_tensor_of_a_number_is_captured(fake: Fake) -> None:
    task = Task.classifier(Constant())
    reader = Reader(task, simulated(task, Plan(engine="trajectories", steps=2, lr=0.1)))
    for _ in range(3):
        reader.scores(columns(5, 1))
    assert (fake.recorded, fake.repeated) == (1, 2) and not reader.warnings


def test_a_tensor_made_in_place_is_the_same_tensor() -> None:
    for number in (0.5, 2, True):
        for dtype in (None, torch.float64):
            with MadeInPlace(), Unrepeatable(torch.device("cpu")):
                found = torch.tensor(number, dtype=dtype)
            assert found.dtype == torch.tensor(number, dtype=dtype).dtype and found.item() == number


@pytest.mark.parametrize(("kind", "operation"), [(Reads, "_local_scalar_dense"), (Masks, "index")])
def test_a_model_that_looks_at_values_is_read_plainly_for_good(
    kind: type[nn.Module], operation: str, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task.classifier(kind())
    store = simulated(task, Plan(engine="trajectories", steps=2, lr=0.1))
    reader = Reader(task, store)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            reader.scores(columns(5, 1))
    assert (fake.rehearsed, fake.recorded) == (1, 0) and not reader.warnings
    assert caplog.text.count(f"the model calls {operation}, which a CUDA graph cannot repeat") == 1


def test_other_settings_of_torch_have_graphs_of_their_own(
    task: Task, store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(task, store)
    for recorded in (1, 2):
        for _ in range(3):
            reader.scores(columns(5, 1))
        assert fake.recorded == recorded
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with torch.autocast("cpu", torch.bfloat16):  # which keeps weights that it has cast, but not for long
        for _ in range(3):
            reader.scores(columns(5, 1))
    assert fake.recorded == 2 and fake.repeated == 4


CAPTURED = ["in_place_relu", "batch_norm", "in_place_residual", "tied_weights", "transformer_layer", "causal_attention"]
CAPTURED += ["always_float64", "scalar_parameter", "dict_batch"]
PLAIN = ["dict_batch_with_titles", "data_dependent_branch", "preallocated_output", "seeded_noise"]


def check_member(name: str, device: torch.device) -> None:
    """Read a kind of model plainly, and by a graph if it is one that can be captured."""
    member = ZOO[name].make(device, torch.float64)
    plan, collate = Plan(engine="trajectories", steps=2, lr=0.1), member.collate_fn
    store = simulate(member.task, member.data, member.sources, plan, collate_fn=collate, progress=False)
    batches = Data(member.queries, device=device, batch_size=100, collate_fn=collate).batches()
    queries = next(iter(batches))[1]
    reader, expected = Reader(member.task, store, capture=True), plain(member.task, store, queries)
    for _ in range(5):
        torch.testing.assert_close(reader.scores(queries), expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    assert not reader._captured.warnings
    assert any(block.graph is not None for block in reader._captured._blocks.values()) == (name in CAPTURED)


@pytest.mark.parametrize("name", CAPTURED + PLAIN)
def test_every_kind_of_model_is_captured_or_read_plainly(name: str, fake: Fake) -> None:
    check_member(name, torch.device("cpu"))


def test_an_error_in_a_recording_is_no_error_of_the_readout(
    task: Task, store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fake, "record", fail)
    reader = Reader(task, store)
    found = [reader.scores(columns(5, 1)) for _ in range(4)]
    assert fake.rehearsed == 1 and all(torch.equal(scores, plain(task, store, columns(5, 1))) for scores in found)


@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_during_a_recording(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is before
        with pytest.raises(ValueError, match="fails"), without_collection():
            raise ValueError("fails")
        assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()


def test_batches_with_anything_but_tensors_are_read_plainly(store: Store, fake: Fake) -> None:
    task = Task.classifier(new_model())
    reader, (x, y) = Reader(task, store), columns(5, 1)
    for _ in range(3):
        reader.scores((x, y, "five"))
    assert fake.rehearsed == 0
    for _ in range(3):
        reader.scores([x, y])
        reader.scores((x, y))  # another container is another graph
    assert fake.recorded == 2


def test_threads_do_not_get_each_others_scores(task: Task, store: Store, fake: Fake) -> None:
    reader, expected = Reader(task, store), [plain(task, store, columns(5, seed)) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: reader.scores(columns(5, i % 4)), range(40)))
    assert all(torch.equal(scores, expected[i % 4]) for i, scores in enumerate(found))
    assert fake.recorded == 1 and fake.repeated == 39


def simulated_language(kind: str, **options: Any) -> tuple[Any, Store]:
    pytest.importorskip("transformers")
    from imprint import language
    from tests.language.models import MODELS, TEXTS, tokenizer

    task = language.task(MODELS[kind]().to(options.pop("dtype", torch.float32)), parameters="last:1", **options)
    data = language.Documents(TEXTS, tokenizer(), length=12).columns
    data["weights"] = data["weights"].to(next(task.model.parameters()).dtype)
    sources = Sources.by_label([row % 3 for row in range(len(data["weights"]))])
    return task, simulate(task, data, sources, Plan(engine="trajectories", steps=2, lr=0.02), progress=False)


def prompt(length: int, seed: int = 0, rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(rows, length)
    weights[:, length // 2 :] = 1.0
    return {"input_ids": torch.randint(300, (rows, length), generator=generator), "weights": weights}


@pytest.mark.parametrize(
    ("kind", "dtype", "near"),
    [
        ("gpt2", torch.float32, 1e-6),
        ("gpt2", torch.float64, 1e-13),
        ("llama", torch.float32, 2e-6),
        ("llama", torch.float64, 1e-6),  # attention weights are float32 there
    ],
)
def test_queries_of_nearby_lengths_share_a_graph(kind: str, dtype: torch.dtype, near: float, fake: Fake) -> None:
    task, store = simulated_language(kind, dtype=dtype)
    reader = Reader(task, store)
    for length in (5, 9, 16, 13, 17, 24, 20):  # the context is 24
        found, expected = reader.scores(prompt(length, length)), plain(task, store, prompt(length, length))
        assert float((found - expected).abs().max()) <= near * float(expected.abs().max())
    assert fake.recorded == 2 and fake.repeated == 3 + 2 and not reader.warnings


def test_values_are_checked_before_a_graph_computes_with_them(fake: Fake) -> None:
    task, store = simulated_language("gpt2")
    reader = Reader(task, store)
    for length in (9, 10, 11):
        reader.scores(prompt(length))
    assert fake.repeated == 2
    foreign = prompt(9)
    foreign["input_ids"][1, 3] = 300
    with pytest.raises(TaskError, match="a token is 300"):
        reader.scores(foreign)
    labelled = {"input_ids": prompt(9)["input_ids"], "labels": prompt(9)["input_ids"].clone()}
    masked = {**labelled, "attention_mask": torch.ones_like(labelled["labels"])}
    for _ in range(2):
        reader.scores(labelled)
        reader.scores(masked)
    before = fake.repeated
    labelled["labels"][0, 2] = 7
    with pytest.raises(TaskError, match="a batch has others"):
        reader.scores(labelled)
    masked = {**masked, "labels": masked["input_ids"].clone()}
    masked["attention_mask"][0, 0] = 0
    with pytest.raises(TaskError, match="padded on the left"):
        reader.scores(masked)
    assert fake.repeated == before


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def check_on_a_gpu(task: Task, store: Store, queries: list[Any], near: float = 1e-6, **options: Any) -> None:
    """Read queries of one shape plainly and by a graph."""
    reader, plainly = (Reader(task, store, capture=capture, **options) for capture in (None, False))
    for each in queries:
        found, expected = reader.scores(each), plainly.scores(each)
        assert float((found - expected).abs().max()) <= near * float(expected.abs().max())
    (block,) = reader._captured._blocks.values()
    assert block.graph is not None and block.graph.repeated == len(queries) - 1
    assert reader.warnings == plainly.warnings


@on_a_gpu
@pytest.mark.parametrize("readout", ["jvp", "central"])
def test_a_perceptron_on_a_gpu(readout: ReadoutName, cuda: torch.device) -> None:
    task = Task.classifier(new_model().to(cuda), measure="margin")
    check_on_a_gpu(task, simulated(task), [columns(5, seed) for seed in range(6)], readout=readout, step=1e-2)


@on_a_gpu
@pytest.mark.parametrize("name", [*CAPTURED, "dict_batch_with_titles", "data_dependent_branch", "seeded_noise"])
def test_every_kind_of_model_on_a_gpu(name: str, cuda: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)  # which says why something is not captured
    check_member(name, cuda)


@on_a_gpu
def test_removals_on_a_gpu(cuda: torch.device) -> None:
    with removing_engine():
        run = HandMadeRun.of(make_model())
        store = simulate(make_task(), make_data(), SOURCES, make_plan(), run=run, progress=False)
        task = make_task(make_model().to(cuda))
        check_on_a_gpu(task, store, [columns(7, seed, torch.float64) for seed in range(6)])


@on_a_gpu
def test_a_tensor_of_a_number_on_a_gpu(cuda: torch.device) -> None:
    task = Task.classifier(Constant().to(cuda))
    store = simulated(task, Plan(engine="trajectories", steps=2, lr=0.1))
    check_on_a_gpu(task, store, [columns(5, seed) for seed in range(4)])


@on_a_gpu
def test_convolutions_on_a_gpu(cuda: torch.device) -> None:
    inner = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    task = Task.classifier(nn.Sequential(*inner, nn.Linear(36, 2)).to(cuda))
    images = [(torch.randn(12, 1, 8, 8), torch.arange(12) % 2) for _ in range(6)]
    sources, plan = Sources.by_label([row % 6 for row in range(12)]), Plan(engine="trajectories", steps=2, lr=0.1)
    check_on_a_gpu(task, simulate(task, images[0], sources, plan, progress=False), images, 1e-5)


@on_a_gpu
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_a_language_model_on_a_gpu(dtype: torch.dtype, near: float, cuda: torch.device) -> None:
    pytest.importorskip("transformers")
    from imprint import language
    from tests.language.models import gpt2

    task, data = language.task(gpt2().to(cuda, dtype), parameters="last:1"), prompt(12, rows=6)
    sources, plan = Sources.by_label([0, 0, 1, 1, 2, 2]), Plan(engine="trajectories", steps=2, lr=0.02)
    store = simulate(task, data, sources, plan, progress=False)
    check_on_a_gpu(task, store, [prompt(length, length) for length in (5, 9, 16, 13, 7, 15)], near)


@on_a_gpu
@pytest.mark.parametrize("kind", [Reads, Masks])
def test_a_model_that_looks_at_values_is_read_plainly_on_a_gpu(kind: type[nn.Module], cuda: torch.device) -> None:
    task = Task.classifier(kind().to(cuda))
    store = simulated(task, Plan(engine="trajectories", steps=2, lr=0.1))
    reader, plainly = (Reader(task, store, capture=capture) for capture in (True, False))
    for seed in range(4):
        torch.testing.assert_close(reader.scores(columns(5, seed)), plainly.scores(columns(5, seed)))
    assert all(block.plain for block in reader._captured._blocks.values()) and not reader._captured.warnings


@on_a_gpu
def test_a_failed_recording_leaves_the_gpu_usable(cuda: torch.device) -> None:
    recorder, values = Recorder(cuda), torch.arange(4.0, device=cuda)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            recorder.record(lambda: values * values.sum().item())
    torch.cuda.empty_cache()
    repeat = recorder.record(lambda: values * 2)
    values += 1
    assert torch.equal(repeat(), torch.arange(1.0, 5.0, device=cuda) * 2)


@on_a_gpu
def test_threads_on_a_gpu_do_not_get_each_others_scores(cuda: torch.device) -> None:
    task = Task.classifier(new_model().to(cuda), measure="margin")
    store = simulated(task)
    reader, plainly = Reader(task, store), Reader(task, store, capture=False)
    expected = [plainly.scores(columns(5, seed)) for seed in range(4)]

    def read(index: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return reader.scores(columns(5, index % 4))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(200)))
    torch.cuda.synchronize()
    assert all(torch.allclose(scores, expected[i % 4], rtol=1e-6, atol=1e-6) for i, scores in enumerate(found))
