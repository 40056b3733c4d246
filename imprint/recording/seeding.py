"""Seeds for every step of a recorded run, and every global generator of random numbers set to one."""

import hashlib
import random

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
