"""Reads what removals really did to queries, from the witnesses in a store's folder."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from imprint.errors import StoreError
from imprint.readout.reader import Reader, repeat_if_stale
from imprint.statistics import Array, Flags
from imprint.store.fingerprint import hash_rows
from imprint.store.reading import Store
from imprint.task import Batch, Task
from imprint.validation.record import Validation, read_examples, read_validation, shorten_hash, witness_folder
from imprint.validation.verdict import Verdict, judge


def open_witnesses(store: Store, validation: Validation) -> list[Store]:
    """Open the stores of a validation's witnesses; refuse those that are not the ones it was made with."""
    found = []
    for run, checksum in enumerate(validation.witnesses):
        witness = Store(witness_folder(store, run), within=store)
        request, own = witness.manifest.request, store.manifest.request
        fits = witness.removes and len(witness) == len(validation.removals) and request.n == own.n
        fits = fits and request.data == own.data and (not store.removes or request.recording == own.recording)
        if witness.sha256 != checksum or not fits:
            raise StoreError(f"{witness.path} does not hold the witnesses of {store.path}: validate the store again.")
        found.append(witness)
    return found


def verify_witnesses(store: Store) -> None:
    """Check every file of a store's witnesses, if it was validated."""
    if (validation := read_validation(store)) is not None:
        for witness in open_witnesses(store, validation):
            witness.verify()


def read_effects(
    task: Task, witnesses: Sequence[Store], batches: Sequence[tuple[int, Batch]], memory: int | str | None = None
) -> Array:
    """Measure what each removal did to F of each query, by plain evaluations, shape (runs, queries, removals)."""
    runs = []
    for witness in witnesses:
        reader = Reader(task, witness, memory=memory)
        scores = repeat_if_stale(reader, partial(_read_scores, reader, batches))
        runs.append((-scores.double() / witness.n).numpy())
    return np.stack(runs)


def _read_scores(reader: Reader, batches: Sequence[tuple[int, Batch]]) -> Tensor:
    return torch.cat([reader.scores(batch, count).cpu() for count, batch in batches])


def predict_removals(effects: Tensor, removals: Sequence[Sequence[int]]) -> Array:
    """Return the predicted effect of each removal: the sum over its sources, shape (queries, removals)."""
    together = [effects.double()[:, list(removal)].sum(1) for removal in removals]
    return torch.stack(together, dim=1).cpu().numpy()


def judge_queries(
    task: Task,
    store: Store,
    validation: Validation,
    effects: Tensor,
    batches: Sequence[tuple[int, Batch]],
    memory: int | str | None = None,
) -> Verdict:
    """Judge predicted effects (queries, sources) on their own queries, but for those that were removed themselves."""
    actual = read_effects(task, open_witnesses(store, validation), batches, memory)
    own = find_uncounted(read_examples(store, validation), batches)
    measured, sizes = store.checkpoints[0].measured, np.array(store.source_sizes)
    if own.all():
        return validation.verdict
    predicted, known = effects.double().cpu().numpy(), (store.question, measured.chaos, measured.deviation)
    return judge(predicted[~own], validation.removals, actual[:, ~own], sizes, *known, own=True)


def find_uncounted(removed: Iterable[bytes | int], batches: Sequence[tuple[int, Batch]]) -> Flags:
    """Tell which queries do not count, shape (queries,): training examples of a removed source, and repeated ones.

    removed: hashes of these training examples.
    """
    known = {each if isinstance(each, int) else shorten_hash(each) for each in removed}
    uncounted = []
    for count, batch in batches:
        for digest in map(shorten_hash, hash_rows(batch, count)):
            uncounted.append(digest in known)
            known.add(digest)
    return np.array(uncounted)
