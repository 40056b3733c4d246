"""Calls of the library that run beside a user's threads, the threads, and the models that both work on."""

import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, Reader, Sources, Store, Task, attribute, check, self_influence, simulate
from tests.attacks.cases import PATIENCE

SECONDS = 0.15
N, WIDTH, CLASSES = 8, 4, 3
SOURCES = Sources.per_example(N)
PLANS = {
    "tangent": Plan(steps=2, lr=0.1),
    "trajectories": Plan(engine="trajectories", steps=2, lr=0.1, keep_pair=True),
    "spectral": Plan(engine="spectral", steps=10, lr=0.1, damping=0.1, directions=4, form="dense"),
}


class Image(nn.Module):
    """A convolution with batch norm, on points taken for pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x.unsqueeze(1))).tanh().flatten(1))
        return out


class Tied(nn.Module):
    """Two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.dropout(self.first(x).tanh()))[:, :CLASSES]
        return out


class Encoder(nn.Module):
    """One layer of attention over the coordinates of a point."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.up(x.unsqueeze(-1))).mean(1))
        return out


def dropping_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": dropping_mlp,
    "batch_norm": Image,
    "attention": Encoder,
    "tied": Tied,
}


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (n,), generator=generator)


@dataclass
class Bench:
    """A live model with its task and its stores, and what calls and forwards give when nothing else runs."""

    kind: str
    model: nn.Module
    task: Task
    data: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    state: dict[str, Tensor]
    stores: dict[str, Store]
    reader: Reader
    expected: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = [id(p) for p in self.model.parameters()]

    @classmethod
    def of(cls, kind: str) -> "Bench":
        torch.manual_seed(3)
        task = Task.classifier(KINDS[kind]().double().train())
        return cls.on(task, kind, points(N, 1), points(4, 2), PLANS)

    @classmethod
    def on(cls, task: Task, kind: str, data: Any, queries: Any, plans: dict[str, Plan]) -> "Bench":
        """Simulate every plan once."""
        state = {name: tensor.detach().clone() for name, tensor in task.model.state_dict().items()}
        stores = {
            name: simulate(task, data, SOURCES, plan, checkpoints=[state], progress=False)
            for name, plan in plans.items()
        }
        return cls(kind, task.model, task, data, queries, state, stores, Reader(task, stores["tangent"]))

    def attribute(self, readout: Any, store: str = "tangent") -> Tensor:
        return attribute(self.task, self.stores[store], self.queries, readout=readout, progress=False).scores

    def simulate(self, engine: str) -> Tensor:
        """The imprints of a fresh simulation, as one vector."""
        plan = PLANS[engine]
        store = simulate(self.task, self.data, SOURCES, plan, checkpoints=[self.state], progress=False)
        stack = store.imprints(0, 0, len(store), torch.device("cpu"))
        return torch.cat([stack[name].flatten() for name in sorted(stack)])

    def check(self) -> Tensor:
        """Whether the check says that all will work."""
        found = check(self.task, self.data, SOURCES, PLANS["tangent"], checkpoints=[self.state], queries=self.queries)
        return torch.tensor([found.ok])

    def restore(self) -> None:
        """Put the live model back where it was."""
        if self.intact():
            self.model.load_state_dict(self.state)
            self.model.train()
            self.model.zero_grad()

    def intact(self) -> bool:
        """Whether the live model still has its own parameters."""
        return self.own == [id(p) for p in self.model.parameters()]


_BENCHES: dict[str, Bench] = {}


def bench(kind: str) -> Bench:
    """Return the bench of a kind of model; a fresh one where the model was left in another state than before."""
    if kind not in _BENCHES or not _BENCHES[kind].intact():
        made = _BENCHES[kind] = Bench.of(kind)
        for name, call in CALLS.items():
            made.expected[name] = call(made)
        made.restore()
    return _BENCHES[kind]


CALLS: dict[str, Callable[[Bench], Tensor]] = {
    "jvp": lambda b: b.attribute("jvp"),
    "central": lambda b: b.attribute("central"),
    "literal": lambda b: b.attribute("literal", "trajectories"),
    "gradient": lambda b: b.attribute("gradient"),
    "reader": lambda b: b.reader.scores(b.queries),
    "tangent": lambda b: b.simulate("tangent"),
    "trajectories": lambda b: b.simulate("trajectories"),
    "spectral": lambda b: b.simulate("spectral"),
    "self_influence": lambda b: self_influence(b.task, b.stores["tangent"], b.data, progress=False),
    "check": lambda b: b.check(),
}


# --- what users do meanwhile: each makes a function that is called again and again, and raises on what it must not see

Act = Callable[[], None]


def close(kind: str, one: Tensor, other: Tensor) -> bool:
    """Bit-equal; but kernels of attention are chosen by a setting of the process, and differ in the last digits."""
    return torch.equal(one, other) if kind != "attention" else torch.allclose(one, other, atol=1e-6)


def forwards(b: Bench) -> Act:
    """Evaluate the live model, in evaluation mode, and find its own outputs."""
    b.model.eval()
    with torch.no_grad():
        own = b.model(b.queries[0])

    def act() -> None:
        with torch.no_grad():
            assert close(b.kind, b.model(b.queries[0]), own), "the live model gave other outputs"

    return act


def forwards_in_inference_mode(b: Bench) -> Act:
    b.model.eval()
    with torch.inference_mode():
        own = b.model(b.queries[0])

    def act() -> None:
        with torch.inference_mode():
            assert close(b.kind, b.model(b.queries[0]), own), "the live model gave other outputs"

    return act


def forwards_under_autocast(b: Bench) -> Act:
    """Autocast leaves float64 alone, so that a copy in float32 is used."""
    model = copy.deepcopy(b.model).float().eval()
    x = b.queries[0].float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own = model(x)

    def act() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(model(x), own, atol=1e-2), "a model under autocast gave other outputs"

    return act


def state_dicts(b: Bench) -> Act:
    """Copy the state of the live model, as for a checkpoint."""

    def act() -> None:
        copied = {name: tensor.clone() for name, tensor in b.model.state_dict().items()}
        assert copied.keys() == b.state.keys(), "the state has other names"
        assert all(torch.equal(copied[name], b.state[name]) for name in copied), "the state holds other weights"

    return act


def saves(b: Bench) -> Act:
    """Save the live model with torch.save, and load it."""

    def act() -> None:
        buffer = io.BytesIO()
        torch.save(b.model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert all(torch.equal(loaded[name], b.state[name]) for name in b.state), "a saved file holds other weights"

    return act


def deep_copies(b: Bench) -> Act:
    def act() -> None:
        copied = copy.deepcopy(b.model)
        assert copied.training, "a copy was made in evaluation mode"
        state = copied.state_dict()
        assert all(torch.equal(state[name], b.state[name]) for name in b.state), "a copy holds other weights"

    return act


def parameters(b: Bench) -> Act:
    """Look at what an optimiser would be given."""
    own = {name: id(p) for name, p in b.model.named_parameters()}

    def act() -> None:
        found = dict(b.model.named_parameters())
        assert {name: id(p) for name, p in found.items()} == own, "the live model's parameters are other objects"
        assert all(type(p) is nn.Parameter and p.requires_grad for p in found.values())

    return act


def modes(b: Bench) -> Act:
    """Find every module of the live model in training mode."""

    def act() -> None:
        assert all(module.training for module in b.model.modules()), "a module was put into evaluation mode"

    return act


def training(b: Bench) -> Act:
    """Take a step of training: on these weights, with dropout, and exactly that step."""
    optimiser = torch.optim.SGD(b.model.parameters(), 0.01)
    dropped: list[bool] = []
    training_now = threading.local()  # a copy of the model may carry the hook along into other threads

    def look(module: nn.Module, given: Any, output: Tensor) -> None:
        if getattr(training_now, "here", False):
            dropped.append(bool((output == 0).any()))

    for module in b.model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(look)
    counted = [t for name, t in b.model.named_buffers() if name.endswith("num_batches_tracked")]

    def act() -> None:
        before = {name: p.detach().clone() for name, p in b.model.named_parameters()}
        tracked = [int(count) for count in counted]
        dropped.clear()
        optimiser.zero_grad()
        training_now.here = True
        F.cross_entropy(b.model(b.data[0]), b.data[1]).backward()
        optimiser.step()
        for name, p in b.model.named_parameters():
            assert p.grad is not None, f"{name} got no gradient"
            step = before[name] - 0.01 * p.grad
            assert torch.allclose(p, step, rtol=1e-12, atol=1e-14), f"{name} made another step"
        assert all(dropped), "dropout did not drop"
        assert [int(count) for count in counted] == [count + 1 for count in tracked], "batch norm did not count"

    return act


def toggles(b: Bench) -> Act:
    """Switch the live model between its modes, and find it in the one it was put into."""

    def act() -> None:
        for mode in (False, True):
            b.model.train(mode)
            time.sleep(0)
            assert all(module.training is mode for module in b.model.modules()), "the mode changed by itself"

    return act


def same(name: str, label: str = "") -> Callable[[Bench], Act]:
    """Make the same calls on the same task from another thread."""

    def made(b: Bench) -> Act:
        def act() -> None:
            require(name, CALLS[name](b), b.expected[name])

        act.__name__ = label or name
        return act

    return made


def other(name: str) -> Callable[[Bench], Act]:
    """Make calls on another task from another thread."""

    def made(b: Bench) -> Act:
        there = bench("tied" if b.kind != "tied" else "mlp")
        return lambda: require(name, CALLS[name](there), there.expected[name])

    return made


def own_readers(b: Bench) -> Act:
    """Make a reader for every call."""
    return lambda: require("reader", Reader(b.task, b.stores["tangent"]).scores(b.queries), b.expected["reader"])


def users_vmap(b: Bench) -> Act:
    x = torch.randn(4, 3)
    right = x.sin().sum(1)

    def act() -> None:
        assert torch.equal(torch.func.vmap(lambda row: row.sin().sum())(x), right), "the user's vmap gave other values"

    return act


def users_gradients(b: Bench) -> Act:
    x = torch.randn(4, 3)
    right = x.cos()

    def act() -> None:
        found = torch.func.grad(lambda x: x.sin().sum())(x)
        assert torch.equal(found, right), "the user's grad gave other values"

    return act


def numbers_of_threads(b: Bench) -> Act:
    turn = [1]

    def act() -> None:
        turn[0] = 3 - turn[0]
        torch.set_num_threads(turn[0])

    return act


def default_settings(b: Bench) -> Act:
    """Switch settings that belong to one thread."""

    def act() -> None:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            torch.randn(3)

    return act


THREADS: dict[str, Callable[[Bench], Act]] = {
    "forwards": forwards,
    "state_dicts": state_dicts,
    "training": training,
    "modes": modes,
    "toggles": toggles,
    "saves": saves,
    "deep_copies": deep_copies,
    "parameters": parameters,
    "inference_mode": forwards_in_inference_mode,
    "autocast": forwards_under_autocast,
    "same_jvp": same("jvp"),
    "same_gradient": same("gradient"),
    "same_reader": same("reader"),
    "same_simulation": same("tangent"),
    "same_check": same("check"),
    "other_jvp": other("jvp"),
    "other_simulation": other("trajectories"),
    "own_readers": own_readers,
    "vmap": users_vmap,
    "grad": users_gradients,
    "number_of_threads": numbers_of_threads,
    "settings": default_settings,
}


def require(name: str, found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """Fail unless a call gave what it gives alone."""
    one, other = found.double(), expected.double()
    near = one.shape == other.shape and float((one - other).abs().max()) <= tolerance * float(other.abs().max())
    assert near, f"{name} gave other values than it does alone"


@contextmanager
def beside(act: Act, threads: int = 1) -> Iterator[list[BaseException]]:
    """Call `act` again and again in other threads, and collect what it raises."""
    failures: list[BaseException] = []
    stop, started = threading.Event(), threading.Barrier(threads + 1)

    def run() -> None:
        started.wait(PATIENCE)
        while not stop.is_set() and not failures:
            try:
                act()
            except BaseException as error:
                failures.append(error)

    workers = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    started.wait(PATIENCE)
    try:
        yield failures
    finally:
        stop.set()
        for worker in workers:
            worker.join(PATIENCE)
    assert not any(worker.is_alive() for worker in workers), "a thread hangs"


def repeat(call: Callable[[], None], seconds: float = SECONDS, times: int = 1) -> None:
    """Make a call for a while, and at least a few times."""
    until = time.monotonic() + seconds
    done = 0
    while done < times or time.monotonic() < until:
        call()
        done += 1
