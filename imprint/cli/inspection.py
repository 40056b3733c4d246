"""Describes a store in plain values, for `imprint inspect` and for programs."""

from typing import Any

import torch

from imprint.store.reading import Store
from imprint.tensors.vectors import row_norms, spread


def inspect_store(store: Store) -> dict[str, Any]:
    """Return the plan, sizes and figures of a store, and the norms of its imprints, as JSON values."""
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
        if checkpoint.layers:
            entry["layers"] = list(checkpoint.layers)
        if checkpoint.weight > 0:
            entry["imprint_norms"] = checkpoint.figures.get("norms") or _compute_norms(store, index)
        checkpoints.append(entry)
    return {
        "path": str(store.path),
        "sources": len(store),
        "n": store.n,
        "largest_sources": [
            {"id": store.source_ids[i], "name": store.source_names[i], "size": store.source_sizes[i]}
            for i in sorted(range(len(store)), key=lambda index: -store.source_sizes[index])[:8]
        ],
        "parameters": sum(torch.Size(p["shape"]).numel() for p in manifest.parameters.values()),
        "dtype": manifest.dtype,
        "bytes": store.bytes,
        "bytes_per_source": _bytes_per_source(store),
        "plan": manifest.plan.to_json(),
        "checkpoints": checkpoints,
        "readouts": list_readouts(store),
        "warnings": list(store.warnings),
        "cost": manifest.cost,
        "note": manifest.note,
        "versions": manifest.versions,
        "created": manifest.created,
    }


def list_readouts(store: Store) -> list[str]:
    """List the readouts that work with a store."""
    plan = store.manifest.plan
    has_pair = plan.engine == "trajectories" and (plan.keep_pair or plan.variant != "two_sided")
    return ["jvp", "central", *(["literal"] if has_pair else []), "gradient"]


def _bytes_per_source(store: Store) -> int:
    """Return the bytes per source over all checkpoints, without what sources share."""
    return sum(file.bytes for c in store.checkpoints for file in (*c.imprints, *c.midpoints)) // len(store)


def _compute_norms(store: Store, checkpoint: int) -> dict[str, float]:
    """Compute the norms of imprints in a store that does not record them."""
    found: list[float] = []
    for file in store.checkpoints[checkpoint].imprints:
        assert file.rows is not None
        found += row_norms(store.imprints(checkpoint, *file.rows, torch.device("cpu"))).tolist()
    return spread(found)
