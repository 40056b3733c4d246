"""Defines the variants of a peer at early checkpoints: each of a few epochs alone, and their mean.

Much of our own lead comes from early checkpoints, so the other methods are given the same ones. Which variant counts is
chosen as a damping is: the best on the ground truth itself, which favours the peer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from imprint.benchmarking.bench import Protocol, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.task import Parameters

EPOCHS = (2, 3, 5, 8)  # those at which a single checkpoint of the MNIST perceptron says most


def early_epochs(protocol: Protocol, epochs: Sequence[int] = EPOCHS) -> tuple[int, ...]:
    """Return those of some epochs at which the benchmark keeps checkpoints, without the trained model."""
    return tuple(epoch for epoch in protocol.epochs[:-1] if epoch in epochs)


def at_epoch(protocol: Protocol, runs: Runs, epoch: int) -> list[Parameters]:
    """Return the checkpoint of each run after an epoch."""
    index = protocol.epochs.index(epoch)
    return [kept[index] for kept in runs]


def try_epochs(epochs: Sequence[int], score_at: Callable[[int], MethodScores]) -> Iterator[MethodScores]:
    """Score at each epoch, and by the mean over all of them."""
    found = []
    for epoch in epochs:
        found.append(score_at(epoch))
        yield name_epochs(found[-1], [epoch])
    if len(found) > 1:
        yield name_epochs(add_costs(torch.stack([each.scores for each in found]).mean(0), found), epochs)


def add_costs(scores: torch.Tensor, parts: Sequence[MethodScores]) -> MethodScores:
    """Return scores that cost what all their parts cost."""
    return replace(
        parts[0], scores=scores, prepare=sum(each.prepare for each in parts), query=sum(each.query for each in parts)
    )


def name_epochs(found: MethodScores, epochs: Sequence[int]) -> MethodScores:
    """Put the epochs before the note."""
    text = f"epoch {epochs[0]}" if len(epochs) == 1 else f"mean of epochs {', '.join(map(str, epochs))}"
    return replace(found, note=f"{text}, {found.note}" if found.note else text)
