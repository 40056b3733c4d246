"""Chooses how many threads a model is computed with.

Threads of one operation wait for each other. A small model has operations of microseconds, so a second thread gains
little on an idle machine; on a busy one it waits until the scheduler lets it run, and everything takes 5 to 20 times as
long. `benchmarks/threads.py` measures it.
"""

import logging
import os

import torch
from torch import nn

logger = logging.getLogger(__name__)

_PARAMETERS_PER_THREAD = 5_000_000
_AT_START = torch.get_num_threads()  # one for each core, unless the environment says otherwise
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which a user chooses
_warned = False


def threads_for(parameters: int, cores: int) -> int:
    """Return how many threads to use for a model of this size: one for each five million parameters.

    >>> [threads_for(parameters, cores=8) for parameters in (100_000, 12_000_000, 124_000_000)]
    [1, 2, 8]
    """
    return max(1, min(cores, parameters // _PARAMETERS_PER_THREAD))


def set_threads(model: nn.Module) -> None:
    """Set the number of threads of a process that is ours, such as the command line's or a worker's.

    A number the user chose stays, by an environment variable or by `torch.set_num_threads` in their own file.
    """
    chosen = any(map(os.environ.get, _VARIABLES)) or torch.get_num_threads() != _AT_START
    if not chosen and _on_cpu(model):
        torch.set_num_threads(threads_for(_size(model), _AT_START))


def warn_of_threads(model: nn.Module) -> None:
    """Warn, once in a process, where a model is computed with several threads and one would do better."""
    global _warned
    threads = torch.get_num_threads()
    if threads == 1 or _warned or not _on_cpu(model) or threads_for(_size(model), threads) > 1:
        return
    _warned = True
    logger.warning(
        "computing a model of %s parameters with %d threads: on a busy machine one thread is several times faster; "
        "call torch.set_num_threads(1), or set OMP_NUM_THREADS=1",
        f"{_size(model):,}",
        threads,
    )


def _on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
