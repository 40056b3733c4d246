"""Says how scores and ground truth were made: folders, fingerprints, versions and the command."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from imprint.attribution.labels import MEANINGS
from imprint.display import count_of
from imprint.evaluation.reports.findings import Findings
from imprint.store.reading import Store


def describe_making(findings: Findings, store: Store | None, command: str | None) -> list[tuple[str, str]]:
    """Return how scores and ground truth were made, name by name."""
    from imprint import __version__ as version

    labels, truth = findings.result.labels, findings.truth
    prints, about = labels.fingerprints, truth.about
    pairs = [
        ("question of the scores", labels.meaning),
        ("question of the ground truth", MEANINGS[truth.question]),
        ("scores", _describe_scores(findings, store)),
        ("fingerprint of the store", _shorten(prints.get("store"))),
        ("recorded run", _shorten(None if store is None else store.manifest.request.recording)),
        ("training data", f"{labels.n:,} examples, {count_of(len(labels.source_ids), 'source')}"),
        ("fingerprint of the queries", _shorten(prints.get("queries"))),
        ("ground truth", _describe_truth(findings)),
        ("recorded run of the ground truth", _shorten(findings.recordings[1])),
        ("ground truth made", _describe_circumstances(about)),
        ("versions of the store", "" if store is None else _describe_versions(store.manifest.versions)),
        ("report made", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, imprint {version}"),
        ("by", command or ""),
    ]
    return [(name, text) for name, text in pairs if text]


def _describe_scores(findings: Findings, store: Store | None) -> str:
    readout = findings.result.details.get("readout")
    read = f"read out by {readout}" if readout else ""
    if "calibration" in findings.result.details:
        read += f", multiplied by {findings.result.details['calibration']:.3g} (calibrated)"
    if store is None:
        return read
    used = sum(checkpoint.weight > 0 for checkpoint in store.checkpoints)
    made = f"store {store.path}, engine {store.manifest.plan.engine}, {count_of(used, 'checkpoint')}"
    return f"{made}, {store.manifest.created}{f'; {read}' if read else ''}"


def _describe_truth(findings: Findings) -> str:
    truth = findings.truth
    runs, subsets, queries = truth.values.shape
    what = "random halves" if findings.halves else "all data, and removals from it"
    made = "replayed from recorded runs" if truth.replayed else "trained"
    often = "once each" if runs == 1 else f"{runs} times each"
    return f"{count_of(subsets, 'model')} ({what}), {made} {often}; {count_of(queries, 'query', 'queries')}"


def _describe_circumstances(about: Mapping[str, Any]) -> str:
    parts = [str(about[name]) for name in ("created", "device") if about.get(name)]
    parts += [f"seed {about['seed']}"] if "seed" in about else []
    versions = about.get("versions")
    return ", ".join([*parts, *([_describe_versions(versions)] if isinstance(versions, dict) else [])])


def _describe_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _shorten(fingerprint: str | None) -> str:
    return "" if fingerprint is None else fingerprint[:16]
