"""Describes a store, or a recording, in plain values, for `imprint inspect` and for programs."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from imprint.attribution.labels import describe_question, describe_replay
from imprint.readout.choice import list_readouts
from imprint.recording.header import read_header
from imprint.recording.journal import read_journal
from imprint.store.reading import Store
from imprint.store.remote import name_place, open_whole
from imprint.validation.record import find_outdated, read_validation


def inspect_store(store: Store) -> dict[str, Any]:
    """Return the plan, sizes and figures of a store, and the norms of its imprints, as JSON values."""
    manifest, found, first = store.manifest, read_validation(store), store.checkpoints[0]
    checkpoints = []
    for run, checkpoint in zip(manifest.request.runs, store.checkpoints, strict=True):
        entry = {"run": run} | {name: getattr(checkpoint, name) for name in ("weight", "steps", "damping")}
        decided = None if checkpoint.decided is None else asdict(checkpoint.decided)
        checkpoints.append({**entry, "decided": decided, "measured": asdict(checkpoint.measured)})
    return {
        "path": store.place,
        "sources": len(store),
        "n": store.n,
        "largest_sources": [
            {
                **{"id": store.source_ids[i], "name": store.source_names[i], "size": store.source_sizes[i]},
                **(asdict(store.about[i]) if store.about else {}),
            }
            for i in sorted(range(len(store)), key=lambda index: -store.source_sizes[index])[:8]
        ],
        **describe_ownership(store),
        "parameters": sum(math.prod(p.shape) for p in manifest.request.displaced.values()),
        "dtype": manifest.dtype,
        "bytes": store.bytes,
        "bytes_per_source": _bytes_per_source(store),
        "question": store.question,
        "meaning": describe_question(store.question, describe_replay(first.measured, first.steps)),
        "recording": manifest.request.recording,
        "plan": manifest.plan.to_json(),
        "checkpoints": checkpoints,
        "readouts": list_readouts(store),
        "validation": _describe_unvalidated(store) if found is None else found.verdict.to_json(),
        "warnings": list(store.warnings),
        "cost": asdict(manifest.cost),
        "note": manifest.note,
        "versions": manifest.versions,
        "created": manifest.created,
        "history": [{**asdict(revision), "summary": str(revision)} for revision in manifest.history],
        "changes_forgotten": manifest.forgotten,
    }


def _describe_unvalidated(store: Store) -> dict[str, Any]:
    """Say that a store was not validated, or not as it is now."""
    outdated = find_outdated(store)
    if outdated is None:
        return {"outcome": "not validated"}
    return {
        "outcome": "not validated",
        "summary": f"not validated since it was changed (before: {outdated.verdict.outcome}): see `imprint validate`",
    }


def describe_ownership(store: Store) -> dict[str, Any]:
    """Return how many sources are described, how many each owner and each licence has, and when that was changed."""
    changes = [{"time": each.time, "sources": len(each.before)} for each in store.description.changes]
    counts = {
        name: dict(Counter(text for about in store.about if (text := getattr(about, field))).most_common())
        for name, field in (("owners", "owner"), ("licences", "licence"))
    }
    every = {identity: asdict(about) for identity, about in store.description.about.items()}
    about = {"described": len(every), "about": every, "descriptions_changed": changes}
    return {"sources": len(store), **counts, **about}


def _bytes_per_source(store: Store) -> int:
    """Return the bytes per source over all checkpoints, without what sources share."""
    return sum(file.bytes for c in store.checkpoints for file in (*c.imprints, *c.midpoints)) // len(store)


def inspect_recording(path: Path) -> dict[str, Any]:
    """Return what a recording holds, finished or not, as JSON values; the class of its optimiser is not needed."""
    folder = open_whole(path)
    header = read_header(folder)
    steps = [entry.step for entry in read_journal(folder, header.groups, header.n)]
    losses = [[batch.loss for batch in step.batches] for step in (steps[:1] + steps[-1:])]
    return {
        "path": name_place(path),
        "recording": header.sha256 if header.finished else None,
        "finished": header.finished,
        "steps": len(steps),
        "n": header.n,
        "data_hashed": header.data is not None,
        "optimiser": header.optimiser,
        "trained": len(header.trained),
        "frozen": len(header.frozen),
        "losses": [None if None in each else sum(each) for each in losses],
        "checkpoints": [kept.step for kept in header.checkpoints],
        "bytes": sum(file.bytes for kept in header.checkpoints for file in kept.files),
        "circumstances": None if header.circumstances is None else asdict(header.circumstances),
        "seed": header.seed,
        "seconds": header.seconds,
        "versions": header.versions,
    }
