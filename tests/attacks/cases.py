"""One attack on the library by a misused model, loss, measure or dataset, and the judge of what comes out.

The right scores come from training the very model in place: every example's loss alone, `backward`, and a step on every
tensor that an optimiser would hold, once with a source up-weighted and once with it down-weighted. Nothing of the
library takes part in that, so whatever hides a weight from the library does not hide it from the reference.
"""

import logging
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._dynamo  # the first derivative imports it, which takes seconds and must not be stopped halfway
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import ImprintError, Plan, Sources, Task, attribute, simulate

Columns = tuple[Tensor, ...]
Expect = Literal["works", "speaks", "honest"]
N, QUERIES, WIDTH, CLASSES, LABELS = 12, 4, 3, 3, 4
STEPS, LR, SHARE = 3, 0.2, 1e-4
TOLERANCE = 1e-3
PATIENCE = float(os.environ.get("ATTACK_PATIENCE", "30"))  # seconds after which a call or a child counts as hanging
FALLBACKS = (  # these name no problem
    "vmap does not take",
    "does not run under vmap",
    "does not support forward mode",
    "factored imprints are",
)
TORCH = "Triggered internally"


def columns(n: int = N, seed: int = 1) -> Columns:
    """Points with classes, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (n,), generator=generator)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mlp() -> nn.Sequential:
    """Return a smooth network of two layers."""
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


@dataclass
class Case:
    """A model with a loss and data, as a user would give them.

    trained: the tensors that an optimiser would hold; by default all that the model registers and does not freeze.
    forward: run once before training in the reference, for models that make their weights in the first forward.
    after: what the user does between making the task and simulating.
    between: what the user does between simulating and attributing; the scores must not change.
    truth: whether right scores are defined at all.
    training_mode: train in training mode, as the user's own loop does, and measure in evaluation mode.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Any] = cross_entropy
    measure: Any = None
    trained: Sequence[Tensor] | None = None
    data: Any = field(default_factory=columns)
    queries: Any = field(default_factory=lambda: columns(QUERIES, seed=2))
    task: dict[str, Any] = field(default_factory=dict)
    after: "Callable[[Case], Any] | None" = None
    between: "Callable[[Case], Any] | None" = None
    forward: bool = False
    truth: bool = True
    training_mode: bool = False
    plan: Plan = field(default_factory=lambda: Plan(steps=STEPS, lr=LR))
    readout: Any = "jvp"
    simulated_as: dict[str, Any] = field(default_factory=dict)
    given: Any = None
    asked: Any = None
    """What the library gets in place of `data` and `queries`, which stay plain columns for the reference."""

    def scores(self) -> Tensor:
        """What the library says."""
        task = Task(self.model, self.loss, measure=self.measure, **self.task)
        if self.after is not None:
            self.after(self)
        train = self.data if self.given is None else self.given
        sources = Sources.by_label([i % LABELS for i in range(N)])
        store = simulate(task, train, sources, self.plan, progress=False, **self.simulated_as)
        if self.between is not None:
            self.between(self)
        asked = self.queries if self.asked is None else self.asked
        return attribute(task, store, asked, readout=self.readout, progress=False).scores

    def right_scores(self) -> Tensor:
        """What training says, shape (queries, sources)."""
        if self.after is not None:
            self.after(self)
        if self.forward:
            self.loss(self.model, _row(self.data, 0))
        trained = [p for p in self.model.parameters() if p.requires_grad] if self.trained is None else self.trained
        self.model.train(self.training_mode)  # a model may rewrite its weights when it changes its mode
        start = [tensor.detach().clone() for tensor in trained]
        rows = []
        for source in range(LABELS):
            ends = []
            for sign in (1, -1):
                self.model.train(self.training_mode)
                for tensor, value in zip(trained, start, strict=True):
                    tensor.data.copy_(value)
                ends.append(self._trained(trained, source, sign * SHARE))
            rows.append((ends[0] - ends[1]) / (2 * SHARE))
        return torch.stack(rows, dim=1)

    def _trained(self, trained: Sequence[Tensor], source: int, share: float) -> Tensor:
        """F of every query after training with a source's examples at another weight."""
        regulariser = self.task.get("regulariser")
        for _ in range(STEPS):
            for tensor in trained:
                tensor.grad = None
            self.model.train(self.training_mode)
            for i in range(N):
                weight = 1 / N + share * (i % LABELS == source)
                (weight * self.loss(self.model, _row(self.data, i)).sum()).backward()
            if regulariser is not None:
                regulariser(self.model).backward()
            for tensor in trained:
                if tensor.grad is not None:
                    tensor.data -= LR * (tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)
        self.model.eval()
        measure = self.measure or self.loss
        values = [measure(self.model, _row(self.queries, q)) for q in range(len(self.queries[0]))]
        return torch.stack([torch.as_tensor(value).detach().double().reshape(()) for value in values])


def _row(batch: Any, i: int) -> Any:
    return tuple(column[i : i + 1] for column in batch)


@dataclass(frozen=True)
class Attack:
    """How to make a case afresh, and what may come of it.

    works: right scores, and no refusal. speaks: an ImprintError, or a warning that names the problem. honest: either.
    says: a pattern of what a warning that names the problem says.
    """

    build: Callable[[], Case]
    expect: Expect
    says: str


Table = dict[str, Attack]


def register(table: Table) -> Callable[..., Callable[[Callable[[], Case]], Callable[[], Case]]]:
    """Return a decorator that puts a case into a table under its own name."""

    def attack(expect: Expect, says: str = r"(?!)") -> Callable[[Callable[[], Case]], Callable[[], Case]]:
        def put(build: Callable[[], Case]) -> Callable[[], Case]:
            assert build.__name__ not in table, f"two attacks are called {build.__name__}"
            table[build.__name__] = Attack(build, expect, says)
            return build

        return put

    return attack


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what the library says in warnings and in its log."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("imprint")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
            said.extend(str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
            said[:] = [message for message in said if not message.startswith(FALLBACKS) and TORCH not in message]
    finally:
        logger.removeHandler(listener)


class Hangs(BaseException):
    """A call took far longer than it may; no `except Exception` catches this."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stop what runs in the main thread after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise Hangs(f"the call takes longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _look(model: nn.Module) -> tuple[dict[str, Tensor], list[int], list[bool]]:
    """Everything of a live model that a call must leave as it is."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: t.detach().clone() for name, t in tensors.items() if _has_values(t)}
    return kept, [id(p) for p in model.parameters()], [module.training for module in model.modules()]


def _has_values(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and not nn.parameter.is_lazy(tensor)


def judge(attack: Attack) -> None:
    """Fail unless the scores are right, or the problem is refused or named; and unless the live model is as before."""
    torch.manual_seed(0)
    case = attack.build()
    untouched = not (case.after or case.between)
    before = _look(case.model) if untouched and isinstance(case.model, nn.Module) else None
    scores: Tensor | None = None
    refusal: ImprintError | None = None
    with heard() as said, limited(PATIENCE):
        try:
            scores = case.scores()
        except ImprintError as error:
            refusal = error
    if before is not None:
        _require_same(before, _look(case.model))
    if refusal is not None:
        assert attack.expect != "works", f"refused: {type(refusal).__name__}: {refusal}"
        assert str(refusal).strip()
        return
    named = any(re.search(attack.says, message, re.IGNORECASE) for message in said)
    assert attack.expect != "speaks" or named, f"nothing was said of it, only {said}"
    if named:
        return
    assert case.truth, f"nothing was said of it, only {said}"
    torch.manual_seed(0)
    right = attack.build().right_scores()
    assert scores is not None and bool(scores.isfinite().all()), f"scores are {scores}"
    off = float((scores - right).norm() / right.norm().clamp_min(1e-9))
    assert off < TOLERANCE, f"scores are off by {off:.1%}, and nothing was said of it, only {said}"


def _require_same(before: Any, now: Any) -> None:
    tensors, identities, modes = now
    changed = [name for name, tensor in before[0].items() if name not in tensors or not _same(tensor, tensors[name])]
    assert not changed, f"the live model's {changed} changed"
    assert set(tensors) == set(before[0]), "the live model has other tensors than before"
    assert identities == before[1], "the live model's parameters are other objects than before"
    assert modes == before[2], "the live model's modules are in another mode than before"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
