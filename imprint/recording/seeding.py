"""Seeds for every step of a recorded run; sets every global generator of random numbers to one, and back."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, *places: int | str) -> int:
    """Return a seed of its own for a place in a run, such as a step: a whole number of 63 bits.

    >>> derive_seed(0, "step", 1) == derive_seed(0, "step", 1) != derive_seed(0, "step", 2)
    True
    """
    text = "/".join(map(str, (seed, *places)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch on every device in use, `random` and numpy: what a micro-batch draws then depends on its seed alone.

    >>> seed_everything(7)
    >>> first = torch.rand(2), random.random(), np.random.rand()
    >>> seed_everything(7)
    >>> torch.equal(first[0], torch.rand(2)), first[1:] == (random.random(), np.random.rand())
    (True, True)
    """
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue calls for devices that are not in use
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.xpu.is_initialized():
        torch.xpu.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # what the user's code may draw from


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore afterwards every generator that `seed_everything` sets.

    >>> seed_everything(7)
    >>> with keep_random_state():
    ...     seed_everything(8)
    >>> after = torch.rand(2), random.random(), np.random.rand()
    >>> seed_everything(7)
    >>> torch.equal(after[0], torch.rand(2)), after[1:] == (random.random(), np.random.rand())
    (True, True)
    """
    here, python, arrays = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    xpu = torch.xpu.get_rng_state_all() if torch.xpu.is_initialized() else None
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(here)
        random.setstate(python)
        np.random.set_state(arrays)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if xpu is not None:
            torch.xpu.set_rng_state_all(xpu)
        if mps is not None:
            torch.mps.set_rng_state(mps)
