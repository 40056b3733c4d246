"""What scores are about: sources, queries, the question they answer, and the measurement with its unit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from imprint.about import NOTHING, About
from imprint.display import count_of, shorten
from imprint.errors import ReadoutError
from imprint.plan import Question, Steps
from imprint.store.checkpoint import Measured
from imprint.task import Better
from imprint.validation.verdict import Verdict

Query = int | Literal["mean"]
"""The number of a query, or the mean over queries."""


MEANINGS: dict[Question, str] = {
    "this_run": "this run: if this source had had weight 0 in the training run that produced this model",
    "expected": "expected: mean over trainings like this one",
}
"""What each question asks, in words."""
_LEFT_OUT = "this run: if this source had been left out of every batch of the training run that produced this model"
NOT_VALIDATED = "not validated: these effects were not compared with removals that were really made (imprint.validate)"
LAST_STEPS, OUT_OF_BATCHES = "last_steps", "left_out_of_batches"
"""Of a replayed run, in the `details` of a result: how many steps were replayed, if not all of them were; and whether
sources were left out of batches instead of being given weight 0, because examples of a batch see each other."""
SHARED_EXAMPLES = "examples_of_several_sources"
"""How many training examples belong to more than one source, in the `details` of a result, if its store says so."""
LEFT_OUT, SHARED = "sources_in_no_group", "sources_in_several_groups"
"""How many sources a result of groups leaves out or counts in more than one group, in its `details`."""


@dataclass(frozen=True)
class Labels:
    """What scores are about: the sources, N, and the measurement F with its direction.

    fingerprints: hashes of the "store", of the "model" it is read at, of the training "data", of the "sources", and of
        the "queries" where the scores are of all of them in their order; the "recording" that was repeated, where one
        was; the key of its "signer", where the store was opened with one; the "plan", as JSON values; and the
        "parameters" by name, with their shapes.
    warnings: what to know before believing the scores: those of the store, and what the readout has found.
    question: "this_run" for the training that made this model, "expected" for the mean over trainings like it.
    removes: whether the scores are those of finite removals, which do not add up exactly.
    summed: how many scores of single sources each score is the sum of; empty where none is a sum.
    difference: whether the scores are the difference of two results.
    source_about: each source's owner, licence and address; empty where nothing is known of any.
    validation: how predicted effects compare with removals that were really made; None where none was. With enough
        queries it is about these, `store_validation` is about those that the store was validated on.
    query_texts: what each query asks, by its number, where the queries came with texts; not written to files.
    """

    n: int
    source_ids: tuple[str, ...]
    source_names: tuple[str, ...]
    source_sizes: tuple[int, ...]
    measure: str
    better: Better
    details: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    question: Question = "expected"
    removes: bool = False
    summed: tuple[int, ...] = ()
    difference: bool = False
    validation: Verdict | None = None
    store_validation: Verdict | None = None
    source_about: tuple[About, ...] = ()
    query_texts: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What a removal effect is measured in, with the meaning of its sign."""
        sign = {"lower": "+", "higher": "−", None: ""}[self.better]
        if self.difference:
            meaning = f": {sign} means the source helps the first more" if sign else ""
            return f"change of {self.measure} if the source were removed, first result minus second{meaning}"
        meaning = f": {sign} means the source helps" if sign else ""
        return f"change of {self.measure} if the source were removed{meaning}"

    @property
    def meaning(self) -> str:
        """The question that the scores answer, in words.

        >>> Labels(9, ("a",), ("A",), (3,), "loss", "lower", question="this_run").meaning
        'this run: if this source had had weight 0 in the training run that produced this model'
        """
        return describe_question(self.question, self.details)

    @property
    def standing(self) -> str:
        """Whether the scores were validated, in words."""
        return NOT_VALIDATED if self.validation is None else str(self.validation)

    @property
    def counts(self) -> Tensor:
        """How many scores of single sources each score is the sum of, shape (sources,)."""
        return torch.tensor(self.summed or (1,) * len(self.source_ids))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, for a file, which does not have the texts of queries: they may be private."""
        verdicts = {"validation": self.validation, "store_validation": self.store_validation}
        plain = {name: None if each is None else asdict(each) for name, each in verdicts.items()}
        about = {**vars(self), **plain, "source_about": [asdict(each) for each in self.source_about]}
        return {name: value for name, value in about.items() if name != "query_texts"}

    @classmethod
    def from_json(cls, about: dict[str, Any]) -> "Labels":
        """Return labels from the checked values of a file."""
        given: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in about.items()}
        return cls(**given)

    def about(self, source: int) -> About:
        """Return what is known of the source in this place."""
        return self.source_about[source] if self.source_about else NOTHING

    def is_estimate(self, source: int) -> bool:
        """Tell whether the score is a sum of finite removals, which only estimates the removal of all of them."""
        return self.removes and bool(self.summed) and self.summed[source] > 1


def describe_question(question: Question, details: Mapping[str, Any]) -> str:
    """Say what a question asks, of a run that was replayed as some details say."""
    steps = details.get(LAST_STEPS)
    part = "" if steps is None else f", in its last {count_of(steps, 'step')} only"
    return (_LEFT_OUT if details.get(OUT_OF_BATCHES) else MEANINGS[question]) + part


def describe_replay(measured: Measured, steps: Steps) -> dict[str, Any]:
    """Return the details of a replayed run, from what was measured at its end and the number of steps."""
    part = {} if measured.start_lost is None else {LAST_STEPS: steps}
    return {**part, **({OUT_OF_BATCHES: True} if measured.leaves_out else {})}


def validated_slope(labels: Labels) -> float:
    """Return the slope of actual on predicted effects that a validation found; refuse one that sets no scale."""
    verdict = labels.validation
    if verdict is None:
        raise ReadoutError(
            "the scores have no validation to calibrate by: make one with imprint.validate(store, queries) and "
            "attribute again, or give ground truth, result.calibrate(truth)."
        )
    if not verdict.calibrates or verdict.figures.slope is None:
        raise ReadoutError(f"the validation of these scores sets no scale: {verdict}.")
    return verdict.figures.slope


def describe_groups(labels: Labels) -> list[str]:
    """Say of a result of groups which sources they leave out or share; nothing where they divide all sources."""
    left_out, shared = (labels.details.get(name, 0) for name in (LEFT_OUT, SHARED))
    return [
        *[f"{count_of(left_out, 'source')} in no group, left out"] * bool(left_out),
        *[f"{count_of(shared, 'source')} in several groups, which therefore do not add up"] * bool(shared),
    ]


def describe_query(query: Query, texts: Sequence[str] = ()) -> str:
    """Name a query in words, with what it asks if that is known: the texts of all queries by number.

    >>> describe_query(1), describe_query(1, ["the ship sails", "the dog barks"])
    ('query 1', 'query 1 (the dog barks)')
    """
    if query == "mean":
        return "mean over queries"
    return f"query {query}" + (f" ({shorten(texts[query])})" if texts else "")
