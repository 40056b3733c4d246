"""Counts what a transformer computes: operations, FLOPs and bytes of forward passes and of training, by its shape.

Everything here is arithmetic on a shape; how long it takes is a matter of the device (`imprint.advice.devices`).
"""

from dataclasses import dataclass

from imprint.errors import PlanError

BLOCK_MATRICES = 12  # times width², the weights of a block: 4 of attention, 8 of a perceptron four times as wide
_ADAPTER = 16  # times rank · width: an adapter on all four linear layers of such a block
_LED_OUT = 2 / 3  # of a block's weights lie before that layer
_WIDE = 4  # times width: what goes into the layer that leads out of a block


@dataclass(frozen=True)
class Work:
    """What a device has to do: operations to start, FLOPs of forward passes and of training, and bytes to move.

    written: bytes that go to a disk.

    >>> Work(operations=2, forward=10) + 3 * Work(forward=5, moved=4)
    Work(operations=2, forward=25, training=0, moved=12, written=0)
    """

    operations: float = 0
    forward: float = 0
    training: float = 0
    moved: float = 0
    written: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.operations + other.operations,
            self.forward + other.forward,
            self.training + other.training,
            self.moved + other.moved,
            self.written + other.written,
        )

    def __rmul__(self, times: float) -> "Work":
        return Work(
            times * self.operations,
            times * self.forward,
            times * self.training,
            times * self.moved,
            times * self.written,
        )


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder.

    length: tokens of an example, which attention sees.
    parameters: all of them; by default those of a GPT-2 of this shape, without its positions.

    >>> gpt2 = Shape(layers=12, width=768, vocabulary=50257, length=1024)
    >>> round(gpt2.block_values * 12 / 1e6), round(gpt2.total / 1e6)
    (85, 124)
    """

    layers: int
    width: int
    vocabulary: int
    length: int
    parameters: float | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "vocabulary", "length"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.parameters is not None and self.parameters <= self.vocabulary * self.width:
            raise PlanError(
                f"{self.parameters:,.0f} parameters are fewer than an embedding of {self.vocabulary:,} tokens in "
                f"{self.width:,} dimensions has: check parameters, vocabulary and width."
            )

    @property
    def block_values(self) -> float:
        """How many values a block has."""
        if self.parameters is None:
            return BLOCK_MATRICES * self.width**2 + 13 * self.width
        return (self.parameters - self.vocabulary * self.width) / self.layers

    @property
    def total(self) -> float:
        """How many values the model has."""
        return self.parameters or self.layers * self.block_values + self.vocabulary * self.width

    def block_flops(self, tokens: float) -> float:
        """Count the FLOPs of a block's forward pass: its matrices, and attention over all pairs of tokens.

        >>> Shape(layers=1, width=10, vocabulary=1, length=5, parameters=1010).block_flops(5)
        11000.0
        """
        return tokens * (2 * self.block_values + 4 * self.length * self.width)

    def head_flops(self, tokens: float) -> float:
        """Count the FLOPs of the output head's forward pass."""
        return 2 * tokens * self.vocabulary * self.width

    def forward_flops(self, tokens: float) -> float:
        """Count the FLOPs of a forward pass."""
        return self.layers * self.block_flops(tokens) + self.head_flops(tokens)


@dataclass(frozen=True)
class Carrier:
    """What is trained, or carries imprints: all parameters, the last blocks, or an adapter on blocks.

    kind: "all"; "last", all weights of some last blocks; "lora", what the preset "lora:R" makes, R numbers for each
        input of the layer that leads out of a block; "adapter", an adapter of a rank on every linear layer.
    size: R or the rank, of an adapter.
    last: how many blocks; None for all.

    >>> shakespeare = Shape(layers=4, width=256, vocabulary=1000, length=128)
    >>> Carrier.read("lora:16").values(shakespeare), Carrier.read("adapter:8:last:2").values(shakespeare)
    (65536, 65536)
    """

    kind: str
    size: int = 0
    last: int | None = None

    @classmethod
    def read(cls, text: str) -> "Carrier":
        """Read "all", "last:2", "lora:16", "adapter:16", or an adapter on the last blocks, as in "lora:16:last:2".

        >>> Carrier.read("lora:16:last:2")
        Carrier(kind='lora', size=16, last=2)
        """
        words = text.split(":")
        numbers = [int(word) for word in words[1::2] if word.isdecimal() and int(word) > 0]
        match words[0::2], len(numbers):
            case ["all"], 0 if len(words) == 1:
                return cls("all")
            case ["last"], 1:
                return cls("last", last=numbers[0])
            case ["lora" | "adapter" as kind], 1:
                return cls(kind, numbers[0])
            case ["lora" | "adapter" as kind, "last"], 2:
                return cls(kind, *numbers)
        raise PlanError(
            f'{text!r} is not understood: say "all", "last:K", "lora:R", "adapter:R", "lora:R:last:K" or '
            '"adapter:R:last:K", where K and R are whole numbers from 1.'
        )

    @property
    def is_adapter(self) -> bool:
        """Whether the base is frozen under it."""
        return self.kind in ("lora", "adapter")

    def blocks(self, shape: Shape) -> int:
        """Return how many blocks carry it."""
        return shape.layers if self.last is None else min(self.last, shape.layers)

    def behind(self, shape: Shape) -> float:
        """Return how many blocks a derivative along it passes; "lora:R" begins near the end of its first block.

        >>> Carrier.read("last:2").behind(Shape(layers=4, width=10, vocabulary=1, length=1))
        2
        """
        return self.blocks(shape) - (_LED_OUT if self.kind == "lora" else 0)

    def values(self, shape: Shape) -> float:
        """Count its values."""
        if self.kind == "all":
            return shape.total
        each = {
            "last": shape.block_values,
            "lora": _WIDE * self.size * shape.width,
            "adapter": _ADAPTER * self.size * shape.width,
        }
        return self.blocks(shape) * each[self.kind]


@dataclass(frozen=True)
class Operations:
    """How many operations a framework starts for one block, forwards and in training; of a head with its loss; and per
    parameter tensor in a step of the optimiser.
    """

    forward: float = 30
    training: float = 90
    head: float = 20


def forward(shape: Shape, tokens: float, operations: Operations) -> Work:
    """Count a forward pass."""
    return Work(operations.forward * shape.layers + operations.head, forward=shape.forward_flops(tokens))


def training_step(
    shape: Shape, carrier: Carrier, tokens: float, operations: Operations, *, checkpointed: bool = False
) -> Work:
    """Count forward and backward passes of a step: three forwards, two where the base is frozen under an adapter.

    A backward pass ends at the first block that is trained. Checkpointing computes the blocks of the backward pass once
    more.

    >>> small = Shape(layers=2, width=10, vocabulary=3, length=5)
    >>> full = training_step(small, Carrier("all"), 5, Operations()).training
    >>> full == 3 * small.forward_flops(5)
    True
    >>> training_step(small, Carrier("adapter", 1), 5, Operations()).training < 0.8 * full
    True
    """
    blocks, head = carrier.blocks(shape), shape.head_flops(tokens)
    behind = blocks * shape.block_flops(tokens)
    if carrier.is_adapter:  # of the frozen weights, only the gradient of what goes in
        flops = shape.forward_flops(tokens) + behind + head + 6 * tokens * carrier.values(shape)
    else:
        flops = shape.forward_flops(tokens) + 2 * behind + (2 if carrier.kind == "all" else 1) * head
    if checkpointed:
        flops += behind
    started = operations.training * blocks + operations.forward * (shape.layers - blocks) + 3 * operations.head
    return Work(started * (4 / 3 if checkpointed else 1), training=flops)
