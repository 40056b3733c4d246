"""Describes a requested ground truth, so that a folder is continued only by the same request."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from imprint.data import Data
from imprint.display import strip_addresses
from imprint.errors import DataError, ImprintError, TaskError, first_line
from imprint.evaluation.subsets import Subsets, require_whole
from imprint.evaluation.together import Together
from imprint.evaluation.training import initialise
from imprint.evaluation.trials import describe_function, shapes
from imprint.evaluation.truth import SCHEMA, of_subsets
from imprint.plan import Question
from imprint.store.fingerprint import of_batches, of_data, of_tensors, probe_measures
from imprint.store.probe_examples import choose_class_examples
from imprint.store.probing import evaluate_losses
from imprint.store.request import describe
from imprint.task import Batch, Task


def describe_request(
    train: Callable[..., Any] | Together | str,
    task: Task,
    subsets: Subsets,
    batches: list[tuple[int, Batch]],
    data: Data | None,
    *,
    runs: int,
    seed: int,
    question: Question = "expected",
    replayed: bool = False,
) -> dict[str, Any]:
    """Describe a ground truth, as far as it is known, in plain JSON values.

    train: what trains or records the models; or the checksum of the one recording that is replayed.
    """
    fingerprints = {**of_subsets(subsets), "queries": of_batches(batches), "parameters": describe(task)}
    fingerprints |= {"data": of_data(data)} if data is not None else {}
    model: list[str] | None = None
    losses: list[float] = []
    if isinstance(train, Together):
        model, initial, losses = _describe_together(train, task)
        fingerprints |= {"initial model": initial}
    request = {
        "schema": SCHEMA,
        "question": question,
        **({"replayed": True} if replayed else {}),
        **{
            "kind": subsets.kind,
            "n": subsets.n,
            "runs": runs,
            "seed": require_whole("seed", seed, 0),
            "subsets": len(subsets),
        },
        **{"queries": sum(size for size, _ in batches), "measure": task.measure_name, "better": task.better},
        "training": _describe_training(train),
        "model": model,
        "fingerprints": fingerprints,
        "probes": {"losses": losses, "measures": _probe(task, batches)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(request))
    return plain


def _describe_training(train: Callable[..., Any] | Together | str) -> Any:
    if isinstance(train, Together):
        return asdict(train.training)
    return {"recording": train} if isinstance(train, str) else describe_function(train)


def _describe_together(train: Together, task: Task) -> tuple[list[str], str, list[float]]:
    """Describe the models before training: their modules, the hash of one, and its losses on probe examples."""
    initial = train.task_of(initialise(train.build, 0).to(train.examples.device))
    if shapes(initial.model) != shapes(task.model):
        raise DataError("the task's model differs from those that are trained: give the task a model from `build`.")
    functional, theta = initial.at(initial.state())
    with initial.evaluating():
        probes = choose_class_examples(train.examples)
        losses = evaluate_losses(functional, theta, train.examples.gather(torch.tensor(probes)), len(probes))
    return strip_addresses(repr(initial.model)).splitlines(), of_tensors(initial.state()), losses


def _probe(task: Task, batches: list[tuple[int, Batch]]) -> list[float]:
    """Measure F of some queries at random parameters."""
    try:
        return probe_measures(task, batches)
    except ImprintError:
        raise
    except Exception as error:
        raise TaskError(f"the measurement failed on the queries: {first_line(error)}.") from error
