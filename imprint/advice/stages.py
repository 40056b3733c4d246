"""Predicts what each stage of attribution takes: recording, replays, simulations, storage, readouts and their service.

The formulas, in words and with every symbol defined, are in docs/scale.md. Forward passes are the common unit: a
training step is three of them, or two under an adapter, and all other counts were measured (`imprint.advice.devices`).
"""

from dataclasses import dataclass, replace

from imprint.advice.devices import Device
from imprint.advice.shapes import Carrier, Shape, Work, forward, training_step
from imprint.errors import PlanError

NOISE_ROWS = 2  # of a replay: runs from slightly perturbed starts
_TRIED = 6  # steps that find out how rows are replayed: two plainly, two of a stack of two


@dataclass(frozen=True)
class Run:
    """A training run: so many tokens in batches of so many.

    compared: examples at which replays are compared with the recorded end, at most 256.
    """

    tokens: float
    batch: float
    compared: float = 256

    def __post_init__(self) -> None:
        if not 0 < self.batch <= self.tokens:
            raise PlanError(
                f"a batch has more than 0 and at most all {self.tokens:,.0f} tokens, got {self.batch:,.0f}."
            )

    @property
    def steps(self) -> float:
        """How many steps it has."""
        return self.tokens / self.batch


@dataclass(frozen=True)
class Model:
    """A model as it is trained: its shape, what of it is trained, and whether blocks are computed again backwards.

    itemsize: bytes of a parameter as the model is loaded; what is trained has 4.
    """

    shape: Shape
    trained: Carrier
    checkpointed: bool = False
    itemsize: int = 2


@dataclass(frozen=True)
class Stage:
    """What a stage takes on one device.

    memory: bytes that must be in its memory at once, where that is more than a training needs.
    """

    name: str
    seconds: float
    binding: str
    stored: float = 0.0
    memory: float = 0.0


def plain_step(device: Device, model: Model, tokens: float) -> Work:
    """Count a training step with Adam."""
    moved = device.value("optimiser bytes") * model.trained.values(model.shape)
    step = training_step(model.shape, model.trained, tokens, device.operations, checkpointed=model.checkpointed)
    return step + Work(moved=moved)


def train(device: Device, model: Model, run: Run) -> Stage:
    """Predict the training itself, without a recorder."""
    found = _stage("training", device, model.shape, run.steps * plain_step(device, model, run.batch))
    return replace(found, memory=_training_bytes(model))


def record(device: Device, model: Model, run: Run) -> Stage:
    """Predict what recording adds: a gradient norm and a line per step, three states and Adam's moments of one."""
    values = model.trained.values(model.shape)
    stored = (3 * 4 + 8) * values
    work = run.steps * Work(moved=device.value("recording bytes") * values) + Work(written=stored)
    found = _stage("recording", device, model.shape, work, stored)
    added = run.steps * device.value("recording")
    return Stage(found.name, found.seconds + added, found.binding, stored, _training_bytes(model))


def replay(
    device: Device, model: Model, run: Run, sources: float, *, stacked: bool, start: float = 0.0, itemsize: int = 4
) -> Stage:
    """Predict a replay without each source, and what its rows take on the disk.

    start: the share of the steps that is left out at the beginning.
    """
    if not 0 <= start < 1:
        raise PlanError(f"start is the share of the run that is left out, from 0 to below 1, got {start}.")
    values, step = model.trained.values(model.shape), plain_step(device, model, run.batch)
    steps, rows = run.steps * (1 - start), sources + NOISE_ROWS
    if stacked:
        rows += 1  # the run as it was, in the stack
        work = steps * (step + _stacked_step(device, step, rows))
    else:
        work = steps * (1 + rows) * step
    if start:
        work = work + 2 * (run.steps + steps) * step  # two sources again, from both starts
    ends = forward(model.shape, run.compared * model.shape.length, device.operations)
    work = work + (rows + 2) * ends + _TRIED * step
    stored = (sources + NOISE_ROWS) * values * itemsize + _base_bytes(model)
    found = _stage("repeating the run", device, model.shape, work + Work(written=stored), stored)
    memory = _training_bytes(model, rows if stacked else 1)
    return Stage(found.name, found.seconds + device.value("preparation"), found.binding, stored, memory)


def _stacked_step(device: Device, step: Work, rows: float) -> Work:
    """Count a step of a stack: operations are shared by its rows, and FLOPs and the optimiser are a row's own."""
    return Work(
        operations=device.value("stacked operations") * step.operations,
        training=rows * device.value("stacked work") * step.training,
        moved=rows * step.moved,
    )


def tangent(
    device: Device,
    model: Model,
    carrier: Carrier,
    sources: float,
    *,
    steps: float,
    tokens: float,
    sampled: float = 0.0,
    itemsize: int = 4,
) -> Stage:
    """Predict a simulation by paths of responses from one checkpoint, on batches of so many tokens.

    sampled: tokens of each source whose gradient a step of mini-batches takes; 0 for full batches, which hold them all.
    """
    shape = model.shape
    once = carrier.behind(shape) * shape.block_flops(tokens) + shape.head_flops(tokens)
    base = training_step(shape, carrier, tokens, device.operations)
    responses = Work(operations=2 * base.operations, forward=sources * _count(device, "response", carrier) * once)
    stored = sources * carrier.values(shape) * itemsize + _base_bytes(model)
    settling = Work(forward=_count(device, "settling", carrier) * once)
    own = sources * training_step(shape, carrier, sampled, device.operations)
    own = Work(training=own.training)  # many sources share the operations of a chunk
    work = (steps + 1) * (base + responses + own) + settling + Work(written=stored)
    found = _stage("simulation, tangent", device, shape, work, stored)
    memory = shape.total * model.itemsize + 3 * sources * carrier.values(shape) * 4
    return Stage(found.name, found.seconds + device.value("preparation"), found.binding, stored, memory)


def spectral(
    device: Device,
    model: Model,
    carrier: Carrier,
    sources: float,
    *,
    directions: float,
    tokens: float,
    itemsize: int = 4,
) -> Stage:
    """Predict a simulation in closed form from one checkpoint: curvature products on all tokens, then their gradients.

    tokens: of all training examples, each of which belongs to one source.
    """
    shape, values = model.shape, carrier.values(model.shape)
    behind = carrier.behind(shape) * shape.block_flops(tokens) + shape.head_flops(tokens)
    products = (directions * device.value("product") + device.value("settling, spectral")) * behind
    projections = (4 * directions * sources + 4 * directions**2) * values  # on the basis, and of the basis on itself
    started = directions * 2 * device.operations.training * carrier.blocks(shape)
    work = Work(operations=started, forward=products + projections) + training_step(
        shape, carrier, tokens, device.operations
    )
    stored = sources * values * itemsize + _base_bytes(model)
    found = _stage("simulation, spectral", device, shape, work + Work(written=stored), stored)
    memory = shape.total * model.itemsize + directions * values * 4
    return Stage(found.name, found.seconds + device.value("preparation"), found.binding, stored, memory)


def stored_bytes(shape: Shape, carrier: Carrier, sources: float, *, itemsize: int = 4) -> float:
    """Count the bytes of dense imprints, without their manifest.

    >>> stored_bytes(Shape(layers=4, width=256, vocabulary=1000, length=128), Carrier.read("lora:16"), 24)
    6291456
    """
    return sources * carrier.values(shape) * itemsize


def readout(
    device: Device, model: Model, carrier: Carrier, sources: float, *, queries: float, itemsize: int = 4
) -> Stage:
    """Predict a batch of queries by forward mode: the trunk once, and the blocks that carry imprints per source.

    queries: of as many tokens as the shape is long.
    """
    shape = model.shape
    tokens = queries * shape.length
    plain = forward(shape, tokens, device.operations)
    along = sources * _count(device, "jvp", carrier) * carrier.behind(shape) * shape.block_flops(tokens)
    read = stored_bytes(shape, carrier, sources, itemsize=itemsize)
    work = Work(
        operations=device.value("jvp operations") * plain.operations,
        forward=plain.forward + shape.head_flops(tokens) + along,  # of the head, its derivative once per query
        moved=read,
    )
    found = _stage("readout, jvp", device, shape, work)
    return Stage(found.name, found.seconds, found.binding, 0.0, read + shape.total * model.itemsize)


def gradient(
    device: Device, model: Model, carrier: Carrier, sources: float, *, queries: float, itemsize: int = 4
) -> Stage:
    """Predict a batch of queries by a backward pass for each, and products with all imprints."""
    shape = model.shape
    step = training_step(shape, carrier, queries * shape.length, device.operations)
    read = stored_bytes(shape, carrier, sources, itemsize=itemsize)
    products = Work(forward=2 * queries * sources * carrier.values(shape), moved=read)
    found = _stage("readout, gradient", device, shape, step + products)
    return replace(found, memory=read + shape.total * model.itemsize)


def removed(device: Device, model: Model, sources: float, *, queries: float, itemsize: int = 4) -> Stage:
    """Predict a batch of queries by plain passes without each source: the readout of replays."""
    shape = model.shape
    plain = forward(shape, queries * shape.length, device.operations)
    read = stored_bytes(shape, model.trained, sources, itemsize=itemsize)
    found = _stage("readout, removed", device, shape, (sources + 1) * plain + Work(moved=read))
    return Stage(found.name, found.seconds, found.binding, 0.0, read + shape.total * model.itemsize)


def _count(device: Device, name: str, carrier: Carrier) -> float:
    """Return a count of forward passes: derivatives along dense weights cost more than along an adapter."""
    return device.value(f"{name}, adapter" if carrier.is_adapter else name)


def _training_bytes(model: Model, rows: float = 1) -> float:
    """Count what trainings hold, beside activations: the model, and of each row values, gradient and two moments."""
    return model.shape.total * model.itemsize + rows * 16 * model.trained.values(model.shape)


def _base_bytes(model: Model) -> float:
    """Count the bytes of the model in a store: what is frozen under an adapter is not kept."""
    return 4 * model.trained.values(model.shape)


def _stage(name: str, device: Device, shape: Shape, work: Work, stored: float = 0.0) -> Stage:
    return Stage(name, device.seconds(work, shape.width), device.binding(work, shape.width), stored)
