"""Texts as columns of tokens: documents to train on, and completions to ask about.

Both have the columns `input_ids` (rows, length) and `weights` (rows, length), where weights[i, t] is the weight of
predicting token t of row i from those before it. Rows are padded on the right with weight 0. A causal model does not
look ahead, so that padding is never seen: no attention mask and no pad token are needed.

Batches of a Trainer of transformers are read as well: a token whose label is not −100 has weight 1.
"""

import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from imprint.compat import has_values
from imprint.errors import DataError, TaskError
from imprint.language.padding import pad_rows, warn_of_padding
from imprint.runtime.notices import Notices
from imprint.sources import Sources

Tokens = list[int]
TokenIds = Sequence[int] | Tensor
IGNORED = -100  # the label of tokens that are not learnt, in transformers
SEGMENTS, EXAMPLES = "segments", "examples"  # columns of packed rows: whose each token is, and which are asked for
_ALTERING = ("position_ids", "token_type_ids", "inputs_embeds", "shift_labels")  # columns that change what a model says
_LONGEST = 1024  # tokens of a window where the tokenizer gives no context, or an enormous one


class Tokenizer(Protocol):
    """What a tokenizer must have, as those of transformers do."""

    def __call__(self, text: str, /) -> Any: ...

    def decode(self, token_ids: list[int], /, **options: Any) -> Any: ...


class Examples:
    """Rows of tokens to train on, each a training example that belongs to one item of the user's dataset.

    columns: what a simulation takes: `input_ids` and the `weights` of predicting each token, (rows, length).
    documents: for each row, the place of its item in the dataset.
    """

    kind = "document"
    columns: dict[str, Tensor]
    documents: Tensor
    _count: int  # items

    def __len__(self) -> int:
        """Return the number of training examples."""
        return len(self.documents)

    @property
    def rows(self) -> Sequence[dict[str, Tensor]]:
        """The examples as a Trainer of transformers takes them: labels are −100 where nothing is learnt.

        A Trainer weighs every token the same, and so does `columns` with loss="sum". The default, "mean", weighs every
        item the same, which is another objective unless all items have equally many learnt tokens.
        """
        labels = self.columns["input_ids"].masked_fill(self.columns["weights"] == 0, IGNORED)
        pairs = zip(self.columns["input_ids"], labels, strict=True)
        return [{"input_ids": ids, "labels": wanted} for ids, wanted in pairs]

    def sources(self, labels: Sequence[Hashable] | Tensor, names: Mapping[Any, str] | None = None) -> Sources:
        """Make one source for each distinct label; `labels[i]` is the label of item i, a column of the dataset."""
        values = list(labels.tolist() if isinstance(labels, Tensor) else labels)
        if len(values) != self._count:
            raise DataError(
                f"there must be one label per {self.kind}: {self._count} {self.kind}s, {len(values)} labels."
            )
        return Sources.by_label([values[index] for index in self.documents.tolist()], names)


class Documents(Examples):
    """Training texts, cut into windows of at most `length` tokens.

    Each window but the first of a document begins with the last token of the one before, so that every token but a
    document's first is predicted exactly once: T tokens make ⌈(T − 1)/(length − 1)⌉ windows.

    length: by default the tokenizer's context, at most 1,024. All rows are as long as the longest, so one long text
        makes all work slower; where most is padding, the log says so.
    loss: of `columns`: "mean", so that every document counts the same whatever its length, or "sum" over its tokens, as
        a Trainer weighs them. With "sum", gradients are larger than a Trainer's by the number of learnt tokens per
        example: divide its learning rate by that. `rows`, and replays of a run on them, are the same for both.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        *,
        length: int | None = None,
        loss: Literal["mean", "sum"] = "mean",
    ) -> None:
        refuse_tokenizer(tokenizer)
        refuse_loss(loss)
        length = check_length(length, tokenizer)
        rows: list[Tokens] = []
        weights: list[list[float]] = []
        owners: list[int] = []
        for index, text in enumerate(check_texts(texts, "documents")):
            tokens = tokens_of(tokenizer, text)
            if not tokens:
                raise DataError(f"document {index} is empty: leave it out.")
            if len(tokens) == 1:
                raise DataError(f"document {index} has a single token, and nothing to predict it from: leave it out.")
            weight = 1.0 if loss == "sum" else 1 / (len(tokens) - 1)
            for start in range(0, len(tokens) - 1, length - 1):
                window = tokens[start : start + length]
                rows.append(window)
                weights.append([0.0] + [weight] * (len(window) - 1))
                owners.append(index)
        warn_of_padding(rows, "cuts longer texts into windows", lambda size, length: -(-(size - 1) // (length - 1)))
        self.columns = pad_rows(rows, weights)
        self._tokenizer = tokenizer
        self.documents = torch.tensor(owners)
        self._count = owners[-1] + 1

    @cached_property
    def texts(self) -> list[str]:
        """The text of each window, without what the one before ends with; for reports and guesses by common words."""
        stops = (self.columns["weights"] != 0).sum(1) + 1  # all tokens but the first of a window are predicted
        follows = [False, *(self.documents[1:] == self.documents[:-1]).tolist()]
        spans = zip(self.columns["input_ids"], follows, stops.tolist(), strict=True)
        return [str(self._tokenizer.decode(row[int(start) : stop].tolist())) for row, start, stop in spans]

    def __repr__(self) -> str:
        windows, length = self.columns["input_ids"].shape
        return f"Documents({self._count} in {windows} windows of up to {length} tokens)"


class Completions:
    """Queries: each a prompt with the completion whose log-likelihood is attributed.

    Prompt and completion are tokenised together, as the model would have met them. A token that spans the two counts
    to the completion. Where nothing stands before the completion, the tokenizer's beginning-of-text token does. A
    completion that lacks the space at its start has other tokens than the word it means; that is a warning, kept in
    `warnings`. `texts` has each prompt with its completion, for reports. `Completions.from_messages` takes chats, and
    `Completions.from_tokens` what a model has just said.

    length: the most tokens a prompt and its completion may have together; by default the tokenizer's context.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        tokenizer: Tokenizer,
        *,
        length: int | None = None,
    ) -> None:
        refuse_tokenizer(tokenizer)
        prompts, completions = check_texts(prompts, "prompts"), check_texts(completions, "completions")
        if len(prompts) != len(completions):
            raise DataError(
                f"every prompt needs its completion: {len(prompts)} prompts, {len(completions)} completions."
            )
        pairs = list(zip(prompts, completions, strict=True))
        split = [split_completion(tokenizer, *pair, f"query {i}") for i, pair in enumerate(pairs)]
        masked = [(before + after, [False] * len(before) + [True] * len(after)) for before, after in split]
        self._set_columns(masked, tokenizer, length)
        self.texts = [prompt + completion for prompt, completion in pairs]
        self.warnings = _warn_of_missing_spaces(prompts, completions, tokenizer)

    @classmethod
    def from_messages(
        cls, conversations: Sequence[Sequence[Mapping[str, Any]]], tokenizer: Tokenizer, *, length: int | None = None
    ) -> "Completions":
        """Make each conversation a query: its last message, which must be the assistant's, is what is attributed.

        conversations: lists of messages, {"role": …, "content": …}, rendered by the tokenizer's chat template. The
            tokens that count are all those of that message which `Conversations` would learn, its end included.
        """
        from imprint.language.chats import render_queries

        made, found = cls.__new__(cls), render_queries(conversations, tokenizer)
        made._set_columns(found, tokenizer, length)
        made.texts = [str(tokenizer.decode(tokens)) for tokens, _ in found]
        made.warnings = ()
        return made

    @classmethod
    def from_tokens(
        cls, answers: Sequence[tuple[TokenIds, TokenIds]], tokenizer: Tokenizer, *, length: int | None = None
    ) -> "Completions":
        """Make each generated answer a query: the tokens that a model was given, and then those that it said.

        Their text may have other tokens, because a tokenizer decodes away a space, or half a character at the end. An
        end-of-text token at the end of an answer does not count.
        """
        refuse_tokenizer(tokenizer)
        begin, end = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
        made, masked = cls.__new__(cls), []
        notices = Notices()
        for index, (given, said) in enumerate(answers):
            before, after = _list_tokens(given), _list_tokens(said)
            after = after[:-1] if after[-1:] == [end] else after
            if not before or not after:
                what = "said nothing" if before else "was given no token"
                raise DataError(f"the model {what} in answer {index}: leave it out.")
            if after[: len(before)] == before and (len(before) > 1 or before == [begin]):
                notices.add(
                    f"answer {index} begins with all tokens that the model was given: if this is what generate "
                    "returned, cut off the prompt, which counts as said otherwise."
                )
            masked.append((before + after, [False] * len(before) + [True] * len(after)))
        if not masked:
            raise DataError("there are no answers: the list is empty.")
        made._set_columns(masked, tokenizer, length)
        made.texts = [str(tokenizer.decode(tokens[tokens[0] == begin :])) for tokens, _ in masked]
        made.warnings = notices.messages
        return made

    def _set_columns(self, queries: list[tuple[Tokens, list[bool]]], tokenizer: Tokenizer, length: int | None) -> None:
        limit = context_of(tokenizer) if length is None else length
        for index, (tokens, counts) in enumerate(queries):
            if limit is not None and len(tokens) > limit:
                prompt = counts.index(True)
                raise DataError(
                    f"query {index} has {prompt} tokens of prompt and {len(tokens) - prompt} of completion, "
                    f"{len(tokens) - limit} more than the {limit} that fit: shorten the prompt from its beginning."
                )
        self.columns = pad_rows([tokens for tokens, _ in queries], [list(map(float, counts)) for _, counts in queries])

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __repr__(self) -> str:
        return f"Completions({len(self)}, {int(self.columns['weights'].sum())} tokens)"


def refuse_tokenizer(tokenizer: object) -> None:
    """Refuse what cannot be called with a text."""
    if not callable(tokenizer):
        raise DataError(f"a tokenizer of transformers is needed, got a {type(tokenizer).__name__}.")


def refuse_loss(loss: object) -> None:
    """Refuse a loss that is neither the mean nor the sum over tokens."""
    if loss not in ("mean", "sum"):
        raise DataError(f'the loss of a document is the "mean" or the "sum" over its tokens, got {loss!r}.')


def check_length(length: int | None, tokenizer: Tokenizer) -> int:
    """Return how many tokens a row may have; by default the tokenizer's context, at most 1,024."""
    length = min(context_of(tokenizer) or _LONGEST, _LONGEST) if length is None else length
    if not isinstance(length, int) or length < 2:
        raise DataError(f"a window needs at least 2 tokens, one to predict from and one to predict; got {length}.")
    return length


def check_texts(texts: Sequence[str], what: str) -> list[str]:
    """Return texts as a list; refuse what is none, such as a single text."""
    if isinstance(texts, str):
        raise DataError(f"{what} must be a list of texts, got a single text: give a list of one.")
    texts = list(texts)
    if not texts:
        raise DataError(f"there are no {what}: the list is empty.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{what} must be texts; number {index} is a {type(text).__name__}.")
    return texts


def context_of(tokenizer: Any) -> int | None:
    """Return the longest input of a tokenizer; None where it gives an enormous number for "unknown"."""
    longest = getattr(tokenizer, "model_max_length", None)
    return int(longest) if longest is not None and longest < 10**9 else None


def _list_tokens(given: TokenIds) -> Tokens:
    """Return tokens as a list of numbers."""
    if isinstance(given, str) or (isinstance(given, Tensor) and given.dim() != 1):
        got = "a text" if isinstance(given, str) else f"a tensor of shape {tuple(given.shape)}"
        raise DataError(f"an answer is given as the numbers of its tokens, one after the other, got {got}.")
    tokens = [int(token) for token in (given.tolist() if isinstance(given, Tensor) else given)]
    if min(tokens, default=0) < 0:
        raise DataError(f"an answer is given as the numbers of its tokens, got {min(tokens)} among them.")
    return tokens


def tokens_of(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return the tokens of a text; none of an empty one."""
    if not text:  # some tokenizers would still put their special tokens
        return []
    return list(tokenizer(text)["input_ids"])


def open_ended(tokenizer: Any, text: str) -> Tokens:
    """Remove the end-of-text token that some tokenizers put after every text, since this text goes on."""
    tokens, end = tokens_of(tokenizer, text), getattr(tokenizer, "eos_token_id", None)
    closed = len(tokens) > 1 and tokens[-1] == end and not text.endswith(tokenizer.decode([end]))
    return tokens[:-1] if closed else tokens


def split_completion(tokenizer: Any, prompt: str, completion: str, whose: str) -> tuple[Tokens, Tokens]:
    """Return the tokens of a prompt and of its completion, which begins where both together differ from the prompt."""
    if not completion:
        raise DataError(f"the completion of {whose} is empty: there is nothing to attribute.")
    whole, alone = open_ended(tokenizer, prompt + completion), open_ended(tokenizer, prompt)
    beginning = getattr(tokenizer, "bos_token_id", None)
    shared = next(
        (i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), min(len(alone), len(whole))
    )
    if shared == 0 and whole and whole[0] == beginning and not completion.startswith(tokenizer.decode([beginning])):
        shared = 1  # a prompt without text, before which the tokenizer has put its own beginning
    if shared == len(whole):
        raise DataError(f"the completion of {whose} has no token of its own: {completion!r}.")
    if shared > 0:
        return whole[:shared], whole[shared:]
    if beginning is None and prompt:
        raise DataError(
            f"nothing is left before the completion of {whose}: its first token spans the prompt {prompt[-12:]!r} and "
            "the completion. Give a longer prompt, or begin the completion with a space."
        )
    if beginning is None:
        raise DataError(
            f"{whose} has no token before its completion, and the tokenizer has no beginning-of-text token to "
            "put there: give a prompt."
        )
    return [beginning], whole


_WITHOUT_SPACES = {
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "HANGUL",
    "THAI",
    "LAO",
    "KHMER",
    "MYANMAR",
    "TIBETAN",
    "BOPOMOFO",
    "YI",
}
_SPACE_FOLLOWS = ",.:;!?)]}…"


def _warn_of_missing_spaces(prompts: list[str], completions: list[str], tokenizer: Any) -> tuple[str, ...]:
    """Warn of completions that run into their prompt without a space, where a space would make other tokens."""
    pairs = list(zip(prompts, completions, strict=True))
    joined = [index for index, pair in enumerate(pairs) if lacks_space(*pair, tokenizer)]
    notices = Notices()
    if joined:
        first = joined[0]
        notices.add(
            f"{len(joined)} of {len(prompts)} completions have no space between them and their prompt, as query "
            f"{first}: {explain_missing_space(*pairs[first])}"
        )
    return notices.messages


def lacks_space(prompt: str, completion: str, tokenizer: Any) -> bool:
    """Tell whether a completion runs into its prompt without a space, where a space would make other tokens."""
    if not _runs_together(prompt, completion):
        return False
    return tokens_of(tokenizer, prompt + completion) != tokens_of(tokenizer, f"{prompt} {completion}")


def explain_missing_space(prompt: str, completion: str) -> str:
    """Say what becomes of a completion that runs into its prompt, and what to write instead."""
    return (
        f"{prompt[-12:]!r} + {completion[:12]!r}. Tokens at the start of a word differ from those in its middle, so "
        f"the credit may go to another source: begin the completion with a space, as {' ' + completion[:12]!r}."
    )


def _runs_together(prompt: str, completion: str) -> bool:
    """Whether a script that parts words by spaces lacks one here: between two words, or after punctuation.

    >>> _runs_together("said Emma", "Woodhouse"), _runs_together("said Emma", " Woodhouse"), _runs_together("作", "者")
    (True, False, False)
    """
    if not prompt or not _in_spaced_word(completion[0]):
        return False
    return prompt[-1] in _SPACE_FOLLOWS or _in_spaced_word(prompt[-1])


def _in_spaced_word(character: str) -> bool:
    script = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return character.isalnum() and script not in _WITHOUT_SPACES


def read_columns(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens of a batch and the weight of predicting each of them, both (rows, length).

    batch: columns of `Documents` or `Completions`, or what a Trainer gives its model, with `labels`.
    """
    columns = set(batch) if isinstance(batch, Mapping) else set()
    if {"input_ids", "weights"} <= columns:
        return batch["input_ids"], batch["weights"]
    if not {"input_ids", "labels"} <= columns:
        given = f"a mapping with {', '.join(map(str, batch)) or 'nothing'}" if isinstance(batch, Mapping) else None
        raise TaskError(
            "a language task takes the columns input_ids and weights: documents.columns of language.Documents to "
            "train on, completions.columns of language.Completions to ask; or input_ids and labels, as a Trainer does; "
            f"got {given or f'a {type(batch).__name__}'}."
        )
    if altering := sorted(columns.intersection(_ALTERING)):
        raise TaskError(
            f"a batch has the column {altering[0]}, which a language task does not pass to the model: leave it out, or "
            "write an imprint.Task whose loss does."
        )
    ids, labels = batch["input_ids"], batch["labels"]
    learnt = labels != IGNORED
    if has_values(ids) and bool((learnt & (labels != ids)).any()):
        raise TaskError(f"the labels of a causal language model are its tokens, or {IGNORED}; a batch has others.")
    if "attention_mask" in columns and has_values(ids):
        _refuse_mask(batch["attention_mask"] != 0, learnt)
    return ids, learnt.to(torch.get_default_dtype())


def segment_sums(of_each: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of what each token has, (rows, length − 1), over the tokens of each example of packed rows, (n,).

    Tokens count to the example whose place `segments` has; those of no example go to the place after the last.
    """
    places, asked = batch[SEGMENTS][:, 1:].flatten(), batch[EXAMPLES][0]
    return of_each.new_zeros(len(asked) + 1).index_add(0, places, of_each.flatten())[asked]


def _refuse_mask(seen: Tensor, learnt: Tensor) -> None:
    """Refuse an attention mask that a causal model needs: other than of padding on the right, which is not learnt."""
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise TaskError(
            "a batch is padded on the left, or in the middle, and a language task gives its model no attention mask: "
            'pad on the right (tokenizer.padding_side = "right").'
        )
    if bool((learnt & ~seen).any()):
        raise TaskError(f"padding is learnt: labels of tokens that the attention mask hides must be {IGNORED}.")
