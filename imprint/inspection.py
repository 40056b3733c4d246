"""What a store holds, in plain values: for `imprint inspect`, and for programs that decide by it."""

import statistics
from typing import Any

import torch

from imprint.store import Store
from imprint.vectors import row_norms


def inspected(store: Store) -> dict[str, Any]:
    """The plan, the sizes and the figures of a store, with the norms of its imprints, as JSON values."""
    manifest = store.manifest
    checkpoints = []
    for index, checkpoint in enumerate(store.checkpoints):
        entry: dict[str, Any] = {
            "weight": checkpoint.weight,
            "steps": checkpoint.steps,
            "lr": checkpoint.lr,
            "damping": checkpoint.damping,
            "epsilon": checkpoint.epsilon,
            "figures": checkpoint.figures,
        }
        if checkpoint.weight > 0:
            norms = [norm for file in checkpoint.imprints if file.rows for norm in _norms(store, index, *file.rows)]
            entry["imprint_norms"] = {"least": min(norms), "median": statistics.median(norms), "largest": max(norms)}
        checkpoints.append(entry)
    return {
        "path": str(store.path),
        "sources": len(store),
        "n": store.n,
        "parameters": sum(torch.Size(p["shape"]).numel() for p in manifest.parameters.values()),
        "dtype": manifest.dtype,
        "bytes": store.bytes,
        "plan": manifest.plan.to_json(),
        "checkpoints": checkpoints,
        "readouts": readouts(store),
        "cost": manifest.cost,
        "note": manifest.note,
        "versions": manifest.versions,
        "created": manifest.created,
    }


def readouts(store: Store) -> list[str]:
    """Which readouts the store can be used with."""
    plan = store.manifest.plan
    has_pair = plan.engine == "trajectories" and (plan.keep_pair or plan.variant != "two_sided")
    return ["jvp", "central", *(["literal"] if has_pair else []), "gradient"]


def _norms(store: Store, checkpoint: int, start: int, stop: int) -> list[float]:
    norms: list[float] = row_norms(store.imprints(checkpoint, start, stop, torch.device("cpu"))).tolist()
    return norms
