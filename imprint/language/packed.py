"""Packed rows: several documents in one row of tokens, each credited for its own tokens.

A training example is a segment, which is what one document has in one row. Its loss is Σ_t −log p(token_t | row before)
over the segment's tokens, so that the loss of a row is the sum over its segments and a source at weight 0 is one whose
tokens are not learnt. As trained with plain packing, a token is predicted from all tokens before it in the row, those
of other documents too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from imprint.data import Data
from imprint.errors import DataError, PlanError
from imprint.language.data import (
    EXAMPLES,
    IGNORED,
    SEGMENTS,
    Examples,
    Tokenizer,
    Tokens,
    check_length,
    check_texts,
    refuse_tokenizer,
    tokens_of,
)
from imprint.recording.reading import Recording
from imprint.recording.records import MicroBatch, Step
from imprint.simulation.recorded import Recorded, open_run, refuse_other_data
from imprint.sources import Sources
from imprint.store.fingerprint import of_data

NOBODY = -1  # the owner of tokens that are no document's, such as padding


class Packed(Examples):
    """Training texts that are put one after the other and cut into rows of exactly `length` tokens, but for the last.

    The tokenizer's end-of-text token, if it has one, follows each document and counts as a part of it. The first token
    of a row is never predicted. Every other token has the same weight, such that the mean of all examples' losses is
    the mean over tokens, as in a Trainer: learning rates mean the same.

    columns: one row per segment, with the tokens of the whole packed row and the weights of the segment's own.
    rows: the packed rows, as a Trainer takes them.
    documents: the document of each segment.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, *, length: int | None = None) -> None:
        refuse_tokenizer(tokenizer)
        length, end = check_length(length, tokenizer), getattr(tokenizer, "eos_token_id", None)
        stream: Tokens = []
        owners: list[int] = []
        for index, text in enumerate(check_texts(texts, "documents")):
            tokens = tokens_of(tokenizer, text)
            if not tokens:
                raise DataError(f"document {index} is empty: leave it out.")
            if end is not None and tokens[-1] != end:
                tokens = [*tokens, end]
            stream += tokens
            owners += [index] * len(tokens)
        starts = range(0, max(1, len(stream) - 1), length)  # a token that is alone in the last row is left out
        rows, parts = [stream[s : s + length] for s in starts], [owners[s : s + length] for s in starts]
        self._set_rows(rows, parts, [[True] * len(row) for row in rows], tokenizer, len(texts))

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int]],
        owners: Sequence[Sequence[int]],
        *,
        labels: Sequence[Sequence[int]] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> "Packed":
        """Take rows that were packed elsewhere.

        rows: the tokens of each row.
        owners: for each token of each row, the number of its document, from 0; −1 for tokens that are no document's.
        labels: as a Trainer takes them, −100 where nothing is learnt; by default all tokens of documents are.
        tokenizer: for `texts` only.
        """
        ids, owned = _as_lists(rows), _as_lists(owners)
        wanted = None if labels is None else _as_lists(labels)
        for name, given in (("owners", owned), ("labels", wanted)):
            if given is not None and list(map(len, given)) != list(map(len, ids)):
                raise DataError(f"{name} must have one number for each token of each row, as rows has.")
        _refuse_owners(owned)
        count = 1 + max((owner for row in owned for owner in row), default=NOBODY)
        if not count:
            raise DataError("no token of the packed rows has an owner: give the number of its document for each.")
        learnt = [[True] * len(row) for row in ids] if wanted is None else [[x != IGNORED for x in w] for w in wanted]
        if wanted is not None and any(
            is_learnt and token != label
            for row, marks, given in zip(ids, learnt, wanted, strict=True)
            for token, is_learnt, label in zip(row, marks, given, strict=True)
        ):
            raise DataError(f"the labels of a causal language model are its tokens, or {IGNORED}; a row has others.")
        made = cls.__new__(cls)
        made._set_rows(ids, owned, learnt, tokenizer, count)
        return made

    def _set_rows(
        self, rows: list[Tokens], owners: list[list[int]], learnt: list[list[bool]], tokenizer: Any, count: int
    ) -> None:
        """Find the segments: each pair of a row and a document that has a token to learn there."""
        places: dict[tuple[int, int], int] = {}
        length = max(map(len, rows))
        segments: list[list[int]] = []
        for number, (owned, marks) in enumerate(zip(owners, learnt, strict=True)):
            counted = [place > 0 and is_learnt and owned[place] != NOBODY for place, is_learnt in enumerate(marks)]
            found = [
                places.setdefault((number, owner), len(places)) if counts else NOBODY
                for owner, counts in zip(owned, counted, strict=True)
            ]
            segments.append(found + [NOBODY] * (length - len(found)))
        self._tokens = torch.tensor(segments)  # the segment that each token is learnt for, (rows, length)
        if empty := sorted(set(range(len(rows))) - {row for row, _ in places}):
            raise DataError(f"packed row {empty[0]} has no token to learn, after its first: leave it out.")
        self._row_of = torch.tensor([row for row, _ in places])
        self.documents = torch.tensor([owner for _, owner in places])
        self._ids, self._tokenizer, self._count = rows, tokenizer, count

    def __repr__(self) -> str:
        rows, length = self._tokens.shape
        return f"Packed({self._count} in {rows} rows of up to {length} tokens, {len(self)} segments)"

    @cached_property
    def columns(self) -> dict[str, Tensor]:  # type: ignore[override]
        """One row per segment: the tokens of its packed row, and the weights of its own."""
        own = self._tokens[self._row_of] == torch.arange(len(self)).unsqueeze(1)
        weights = own.to(torch.get_default_dtype()) * (len(self) / int(own.sum()))
        return {"input_ids": self._padded[self._row_of], "weights": weights}

    @cached_property
    def rows(self) -> list[dict[str, Tensor]]:
        """The packed rows, as a Trainer of transformers takes them; the last one is padded with labels of −100."""
        labels = self._padded.masked_fill(self._tokens == NOBODY, IGNORED)
        return [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(self._padded, labels, strict=True)]

    @cached_property
    def _padded(self) -> Tensor:
        """The tokens of the packed rows, (rows, length), filled up on the right with token 0."""
        return torch.tensor([row + [0] * (self._tokens.shape[1] - len(row)) for row in self._ids])

    @cached_property
    def texts(self) -> list[str]:
        """The text that is learnt in each segment, for reports and guesses by common words."""
        if self._tokenizer is None:
            raise DataError("texts need a tokenizer: give it to Packed.from_rows.")
        found: list[Tokens] = [[] for _ in range(len(self))]
        for row, segments in zip(self._ids, self._tokens.tolist(), strict=True):
            for token, segment in zip(row, segments, strict=False):
                if segment != NOBODY:
                    found[segment].append(token)
        return [str(self._tokenizer.decode(tokens)) for tokens in found]

    def sources(self, labels: Any, names: Any = None) -> Sources:
        """Make one source for each distinct label; `labels[i]` is the label of document i. Members are segments."""
        made = super().sources(labels, names)
        values = labels.tolist() if isinstance(labels, Tensor) else list(labels)
        if lacking := set(map(str, values)) - set(made.ids):
            raise DataError(
                f"source {min(lacking)!r} has no token that is learnt: each of its documents is a single token at the "
                "beginning of a row. Leave them out."
            )
        return made

    def follow(self, run: Recorded, collate_fn: Callable[[list[Any]], Any] | None = None) -> "PackedRun":
        """Read a run that was recorded on `rows` as one of segments, so that a replay can leave out a source's tokens.

        collate_fn: what made batches of rows in training; by default that of the run, if it was a Trainer's.
        """
        return PackedRun(self, run, collate_fn or getattr(run, "collate_fn", None))

    def collate(self, segments: list[int], collate_fn: Callable[[list[Any]], Any]) -> dict[str, Tensor]:
        """Make one batch of the rows of some segments, each row once, and say which tokens are whose."""
        numbers = list(dict.fromkeys(self._row_of[segments].tolist()))
        batch = dict(collate_fn([dict(self.rows[number]) for number in numbers]))
        whose = self._refuse_changes(batch, numbers)
        distinct = {segment: place for place, segment in enumerate(dict.fromkeys(segments))}
        local = torch.full((len(self) + 1,), len(segments))  # where tokens go that were not asked for; −1 is the last
        local[list(distinct)] = torch.arange(len(distinct))
        asked = torch.tensor([[distinct[segment] for segment in segments]])
        return {**batch, SEGMENTS: local[whose], EXAMPLES: asked}

    def _refuse_changes(self, batch: dict[str, Tensor], numbers: list[int]) -> Tensor:
        """Return the segment of each token of a batch of rows; refuse a collate_fn that did more than pad them."""
        ids, whose = torch.stack([self.rows[number]["input_ids"] for number in numbers]), self._tokens[numbers]
        length = ids.shape[1]
        if not torch.equal(batch["input_ids"][:, :length], ids):
            raise DataError(
                "the collate_fn changes the tokens of packed rows: give one that pads on the right at most."
            )
        whose = pad(whose, (0, batch["input_ids"].shape[1] - length), value=NOBODY)
        if "labels" in batch and bool(((batch["labels"] != IGNORED) & (whose == NOBODY))[:, 1:].any()):
            raise DataError(
                "the collate_fn has tokens learnt that packed rows leave out, such as padding: give one that keeps the "
                "labels of the rows, such as transformers.default_data_collator."
            )
        return whose


class PackedRun(Recording):
    """A recorded run on packed rows, read as a run on their segments; `Packed.follow` makes it.

    segments: the training data for `simulate`, with `collate_fn`. Each batch has the rows of the recorded one.
    """

    def __init__(self, packed: Packed, run: Recorded, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        opened = open_run(run)
        if not isinstance(opened, Recording):
            raise PlanError(
                f"follow takes a recorded run, such as imprint.RunRecorder makes, got {type(run).__name__}."
            )
        collate = collate_fn or default_collate
        if opened.n != len(packed.rows):
            raise DataError(
                f"the recorded run has {opened.n} training examples, and there are {len(packed.rows)} packed rows: "
                "record a training on packed.rows."
            )
        refuse_other_data(opened, of_data(Data(packed.rows, device="cpu", collate_fn=collate)), opened.n)
        super().__init__(opened.path, opened.optimiser)
        self._segments_in: dict[int, list[int]] = {}
        for segment, row in enumerate(packed._row_of.tolist()):
            self._segments_in.setdefault(row, []).append(segment)
        self.segments = range(len(packed))
        self.collate_fn = lambda segments: packed.collate(segments, collate)

    @property
    def n(self) -> int:
        """The number of segments."""
        return len(self.segments)

    @property
    def data(self) -> None:
        """None, because the recording has hashes of rows, which were compared when this was made."""
        return

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The recorded steps, with the segments of each row in place of the row."""
        return tuple(replace(step, batches=tuple(map(self._spread, step.batches))) for step in super().steps)

    def _spread(self, batch: MicroBatch) -> MicroBatch:
        if len(set(batch.examples)) < len(batch.examples):
            raise DataError("a batch of the recorded run has a packed row twice, which cannot be replayed.")
        segments = [segment for row in batch.examples for segment in self._segments_in.get(row, ())]
        return replace(batch, examples=tuple(segments))


def _as_lists(rows: Any) -> list[list[int]]:
    """Return rows of whole numbers as lists."""
    found = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    if not found or not all(found):
        raise DataError("packed rows must be lists of tokens, none of them empty.")
    return found


def _refuse_owners(owners: list[list[Any]]) -> None:
    """Refuse owners that are neither the number of a document nor `NOBODY`."""
    for row, owned in enumerate(owners):
        for position, owner in enumerate(owned):
            if not isinstance(owner, Integral) or isinstance(owner, bool) or owner < NOBODY:
                raise DataError(
                    f"the owner of position {position} of packed row {row} is {owner!r}: give the number of its "
                    f"document, from 0, or {NOBODY} for a token that is no document's."
                )
