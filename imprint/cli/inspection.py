"""What a store holds, in plain values: for `imprint inspect`, and for programs that decide by it."""

import math
from dataclasses import asdict
from typing import Any

from imprint.store.reading import Store


def inspected(store: Store) -> dict[str, Any]:
    """The plan, the sizes and the figures of a store, with the norms of its imprints, as JSON values."""
    manifest = store.manifest
    checkpoints = []
    for checkpoint in store.checkpoints:
        entry = {name: getattr(checkpoint, name) for name in ("weight", "steps", "damping")}
        decided = None if checkpoint.decided is None else asdict(checkpoint.decided)
        checkpoints.append({**entry, "decided": decided, "measured": asdict(checkpoint.measured)})
    return {
        "path": str(store.path),
        "sources": len(store),
        "n": store.n,
        "largest_sources": [
            {"id": store.source_ids[i], "name": store.source_names[i], "size": store.source_sizes[i]}
            for i in _largest(store, 8)
        ],
        "parameters": sum(math.prod(p.shape) for p in manifest.parameters.values()),
        "dtype": manifest.dtype,
        "bytes": store.bytes,
        "bytes_per_source": _row_bytes(store),
        "plan": manifest.plan.to_json(),
        "checkpoints": checkpoints,
        "readouts": readouts(store),
        "warnings": list(store.warnings),
        "cost": asdict(manifest.cost),
        "note": manifest.note,
        "versions": manifest.versions,
        "created": manifest.created,
    }


def _largest(store: Store, count: int) -> list[int]:
    return sorted(range(len(store)), key=lambda index: -store.source_sizes[index])[:count]


def readouts(store: Store) -> list[str]:
    """Which readouts the store can be used with."""
    return ["jvp", "central", *(["literal"] if store.manifest.plan.holds_pair else []), "gradient"]


def _row_bytes(store: Store) -> int:
    """What a source takes, of all checkpoints together and without what sources share."""
    return sum(file.bytes for c in store.checkpoints for file in (*c.imprints, *c.midpoints)) // len(store)
