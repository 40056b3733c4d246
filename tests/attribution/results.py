"""Results of made-up scores, for the tests of what can be done with a result."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from imprint import Attribution
from imprint.attribution.labels import Labels
from imprint.attribution.replicates import Replicates
from imprint.readout.units import Over

SCORES = torch.tensor([[3.0, -6.0, 0.5], [-1.0, 2.0, 8.0]], dtype=torch.float64)
NOISE = torch.tensor([[0.1, -0.2], [-0.1, 0.2]], dtype=torch.float64)
"""Effects are −0.3, 0.6, −0.05 and 0.1, −0.2, −0.8: above twice the noise are the first two and the last."""


def make_labels(**changes: Any) -> Labels:
    fields: dict[str, Any] = {
        "n": 10,
        "source_ids": ("ann", "bob", "cid"),
        "source_names": ("Ann", "Bob <b>", "Cid"),
        "source_sizes": (4, 5, 1),
        "measure": "loss",
        "better": "lower",
        "fingerprints": {"store": "s", "sources": "b", "queries": "q"},
    }
    return Labels(**{**fields, **changes})


def make_result(scores: Tensor = SCORES, noise: Tensor | None = None, **changes: Any) -> Attribution:
    return Attribution(make_labels(**changes), scores, noise_changes=noise)


def make_repeated(
    runs: Tensor, shares: Sequence[float] = (), names: str = "", over: Over = "runs", **changes: Any
) -> Attribution:
    """A result of scores of several runs, (runs, queries, sources), with the labels of three sources or of more."""
    shares = tuple(shares) or (1 / len(runs),) * len(runs)
    names = names or "abcdefghijklmnopqrstuvwxyz"[: len(runs)]
    if runs.shape[2] != 3:
        ids = tuple(f"s{number}" for number in range(runs.shape[2]))
        changes = {"source_ids": ids, "source_names": ids, "source_sizes": (1,) * len(ids), **changes}
    mean = torch.einsum("r,rqs->qs", torch.tensor(shares, dtype=torch.float64), runs.double())
    replicates = (Replicates(runs - mean, shares, tuple(names), over),)
    return Attribution(make_labels(**changes), mean, replicates=replicates)


def make_replayed(scores: Tensor = SCORES, noise: Tensor | None = NOISE, **changes: Any) -> Attribution:
    """A result as a store of finite removals gives it."""
    return make_result(scores, noise, **{"question": "this_run", "removes": True, **changes})
