"""Predicts, for a company's size, every stage and each option that makes it cheaper, and says what is within reach."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from imprint.advice import stages
from imprint.advice.devices import Device
from imprint.advice.shapes import Carrier, Shape
from imprint.advice.stages import Model, Run, Stage

DAY = 86400.0
PATH = {"steps": 80.0, "batch": 64, "sampled": 32}  # the plan of a language model's sources in docs/results.md
DIRECTIONS = 100
BATCH = 16  # queries that a service reads at once
FEW, SAMPLE = 32, 0.01  # sources that a cheap score lets through; share of the queries that are attributed


@dataclass(frozen=True)
class Question:
    """A company: its model, training, sources and queries per day, and how many GPUs it has, for how many days."""

    parameters: float
    layers: int
    width: int
    tokens: float
    sources: int
    queries: float
    vocabulary: int = 32000
    length: int = 1024
    batch: float = 2**19
    rank: int = 16
    gpus: int = 64
    days: float = 30.0

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, self.vocabulary, self.length, self.parameters)


@dataclass(frozen=True)
class Plan:
    """A stage by one option: what it takes of one GPU, in all or per query, and how many GPUs it needs."""

    stage: str
    option: str
    seconds: float
    gpus: int
    stored: float
    binding: str
    per_query: bool = False


def predict_all(device: Device, question: Question) -> list[Plan]:
    """Predict all stages and options."""
    return [*_training_time(device, question), *_query_time(device, question)]


def _training_time(device: Device, question: Question) -> Iterator[Plan]:
    shape, adapter = question.shape, Carrier("adapter", question.rank)
    full, lora = Model(shape, Carrier("all"), checkpointed=True), Model(shape, adapter, checkpointed=True)
    run, sources = Run(question.tokens, min(question.batch, question.tokens)), question.sources

    def plan(option: str, found: Stage) -> Plan:
        holding = math.ceil(found.memory / device.value("memory"))
        needed = math.ceil(found.seconds / (question.days * DAY))
        binding = "memory" if holding > needed else found.binding
        return Plan(found.name, option, found.seconds, max(needed, holding), found.stored, binding)

    def in_turn(model: Model, count: float = sources, start: float = 0.0) -> Stage:
        return stages.replay(device, model, run, count, stacked=False, start=start)

    yield plan("all parameters", stages.train(device, full, run))
    yield plan(f"LoRA of rank {question.rank}", stages.train(device, lora, run))
    if device.knows("recording", "recording bytes"):
        yield plan("all parameters", stages.record(device, full, run))
        yield plan(f"LoRA of rank {question.rank}", stages.record(device, lora, run))
    yield plan("all parameters", in_turn(full))
    yield plan(f"LoRA of rank {question.rank}", in_turn(lora))
    yield plan("LoRA, the last tenth of the run", in_turn(lora, start=0.9))
    if sources > 100:
        yield plan("LoRA, sources in 30 unions", in_turn(lora, 30))
        yield plan("LoRA, 30 unions, the last tenth", in_turn(lora, 30, 0.9))
    tokens, sampled = PATH["batch"] * shape.length, PATH["sampled"] * shape.length
    for carrier in ("lora:16", "lora:16:last:2"):
        found = stages.tangent(
            device, lora, Carrier.read(carrier), sources, steps=PATH["steps"], tokens=tokens, sampled=sampled
        )
        yield plan(f"{carrier}, {PATH['steps']:.0f} steps", found)
    for carrier in ("lora:16:last:2",):
        found = stages.spectral(
            device, lora, Carrier.read(carrier), sources, directions=DIRECTIONS, tokens=question.tokens
        )
        yield plan(f"{carrier}, {DIRECTIONS} directions", found)


def _query_time(device: Device, question: Question) -> Iterator[Plan]:
    shape, sources = question.shape, question.sources
    model = Model(shape, Carrier("adapter", question.rank))

    def plan(option: str, found: Stage, *, carrier: Carrier, itemsize: int = 2, share: float = 1.0) -> Plan:
        seconds = found.seconds / BATCH
        kept = stages.stored_bytes(shape, carrier, sources, itemsize=itemsize)
        holding = math.ceil((kept + shape.total * model.itemsize) / device.value("memory"))
        needed = math.ceil(seconds * share * question.queries / DAY)
        binding = "memory" if holding > needed else found.binding
        return Plan(found.name, option, seconds, max(needed, holding), kept, binding, per_query=True)

    few, sample = min(FEW, sources), f"{SAMPLE:.0%} of the queries"
    for name in ("lora:16", "lora:16:last:2"):
        carrier = Carrier.read(name)
        every, some = (
            stages.readout(device, model, carrier, count, queries=BATCH, itemsize=2) for count in (sources, few)
        )
        bulk = stages.gradient(device, model, carrier, sources, queries=BATCH, itemsize=2)
        yield plan(name, every, carrier=carrier)
        yield plan(f"{name}, {sample}", every, carrier=carrier, share=SAMPLE)
        if few < sources:
            yield plan(f"{name}, {few} sources by a cheap score", some, carrier=carrier)
            yield plan(f"{name}, {few} sources, {sample}", some, carrier=carrier, share=SAMPLE)
        yield plan(name, bulk, carrier=carrier)
        yield plan(f"{name}, {sample}", bulk, carrier=carrier, share=SAMPLE)
    replays, some = (stages.removed(device, model, count, queries=BATCH) for count in (sources, few))
    yield plan("replayed adapters", replays, carrier=model.trained, itemsize=4)
    yield plan(f"replayed adapters, {few} sources, {sample}", some, carrier=model.trained, itemsize=4, share=SAMPLE)


def print_plans(device: Device, question: Question, plans: list[Plan]) -> None:
    """Print what every option takes, and whether the GPUs are enough."""
    shape = question.shape
    print(f"{device.name}: {device.rates_source}\n")
    print(
        f"{question.parameters:.3g} parameters ({shape.layers} × {shape.width}), {question.tokens:.3g} tokens, "
        f"{question.sources:,} sources, {question.queries:.3g} queries a day of {shape.length} tokens; "
        f"{question.gpus} GPUs, {question.days:g} days for a replay or a simulation\n"
    )
    print("| stage | option | one GPU | GPUs | stored | bound by | within reach |\n|---|---|---:|---:|---:|---|---|")
    for plan in plans:
        taken = f"{format_time(plan.seconds)}" + " a query" * plan.per_query
        print(
            f"| {plan.stage} | {plan.option} | {taken} | {plan.gpus:,} | {format_bytes(plan.stored)} | {plan.binding} "
            f"| {'yes' if plan.gpus <= question.gpus else 'no'} |"
        )


def format_time(seconds: float) -> str:
    """Format a time with two digits, from milliseconds to years."""
    for unit, size in (("years", 365 * DAY), ("days", DAY), ("h", 3600.0), ("s", 1.0)):
        if seconds >= size:
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(1000 * seconds)} ms"


def format_bytes(count: float) -> str:
    """Format bytes with two digits."""
    if not count:
        return "–"
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{_two_digits(count / size)} {unit}"
    return f"{_two_digits(count / 1e3)} kB"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.10g}"
