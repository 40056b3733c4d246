"""The user's optimiser, made again from a recording: for one model, or for many rows of parameters at once."""

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from imprint.errors import SimulationError, first_line
from imprint.recording.records import Settings
from imprint.tensors.batching import attempt

_ROWS, _STEPS = 3, 3  # of small random tensors, on which stacking is tried
_OWN_STEPS = 400  # the same for optimisers that are not torch's, which may begin later to treat values together
_CLOSE = 1e-10  # relative, in float64: how far a row may come from where it goes alone


def make_optimiser(
    kind: type[Optimizer], groups: Sequence[Sequence[str]], settings: Sequence[Settings], tensors: Mapping[str, Tensor]
) -> Optimizer:
    """Make an optimiser with the groups and settings of a recording, of these tensors."""
    try:
        return _make(kind, groups, settings, tensors)
    except Exception as error:
        raise SimulationError(
            f"the optimiser {kind.__name__} cannot be made again from its recorded settings ({first_line(error)}): its "
            "class must take a list of parameter groups, and the settings of a group as keywords."
        ) from error


def _make(
    kind: type[Optimizer], groups: Sequence[Sequence[str]], settings: Sequence[Settings], tensors: Mapping[str, Tensor]
) -> Optimizer:
    parts = [
        {"params": [tensors[name] for name in names], **_plain(values)}
        for names, values in zip(groups, settings, strict=True)
    ]
    accepted = inspect.signature(kind).parameters
    return kind(parts, **{name: value for name, value in _plain(settings[0]).items() if name in accepted})


def set_settings(optimiser: Optimizer, settings: Sequence[Settings]) -> None:
    """Give each parameter group some settings; it keeps the others."""
    for group, values in zip(optimiser.param_groups, settings, strict=True):
        group.update(_plain(values))


def _plain(settings: Settings) -> Settings:
    """Turn the lists of JSON into tuples, as optimisers have them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def find_why_not_stackable(
    kind: type[Optimizer], settings: Sequence[Settings], shapes: Sequence[Iterable[torch.Size]]
) -> str | None:
    """Return why rows of parameters cannot be moved together by one optimiser; None if they can.

    Tried on small random tensors of the same ranks: together they must move as each of them does alone.

    shapes: of the parameters of each group.
    """
    ranks = [sorted({len(shape) for shape in group}) for group in shapes]
    names = [[f"{index}/{rank}" for rank in group] for index, group in enumerate(ranks)]
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        return {
            name: torch.randn((_ROWS, *range(2, 2 + rank)), generator=generator, dtype=torch.float64)
            * torch.tensor([1e-3, 1.0, 30.0], dtype=torch.float64).reshape(-1, *[1] * rank)
            for group, each in zip(names, ranks, strict=True)
            for name, rank in zip(group, each, strict=True)
        }

    def move(start: dict[str, Tensor], slopes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        leaves = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
        optimiser = _make(kind, names, settings, leaves)
        for slope in slopes:
            for name, leaf in leaves.items():
                leaf.grad = slope[name].clone()
            optimiser.step()
        return {name: leaf.detach() for name, leaf in leaves.items()}

    count = _STEPS if kind.__module__.startswith("torch.optim") else _OWN_STEPS
    sizes = (10 ** torch.randn(count, generator=generator, dtype=torch.float64)).tolist()  # some gradients are spikes
    start, slopes = draw(), [{name: size * tensor for name, tensor in draw().items()} for size in sizes]
    together, reason = attempt(lambda: move(start, slopes))
    if together is None:
        return f"{kind.__name__} does not take a stack of rows: {reason}"
    for row in range(_ROWS):
        alone, reason = attempt(
            lambda row=row: move(  # type: ignore[misc]
                {name: tensor[row] for name, tensor in start.items()},
                [{name: tensor[row] for name, tensor in slope.items()} for slope in slopes],
            )
        )
        if alone is None:
            return f"{kind.__name__} cannot be tried: {reason}"
        for name, tensor in alone.items():
            if not torch.allclose(together[name][row], tensor, rtol=_CLOSE, atol=_CLOSE):
                return f"{kind.__name__} moves a stack of rows in another way than each of them alone"
    return None
