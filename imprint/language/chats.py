"""Chats and instructions to train on, with the prompt masked: only what the assistant says is learnt.

A chat template renders messages as one text. Some templates mark what the assistant generates. For others each turn of
the assistant is what its conversation adds to the conversation before it, with the prompt for a generation at its end.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch

from imprint.errors import DataError, first_line
from imprint.language.data import (
    Examples,
    Tokenizer,
    Tokens,
    check_length,
    check_texts,
    refuse_loss,
    refuse_tokenizer,
    split_completion,
)
from imprint.language.padding import pad_rows, warn_of_padding
from imprint.runtime.notices import Notices

Message = Mapping[str, Any]
"""A message of a conversation: its "role", such as "user" or "assistant", and its "content"."""

Masked = tuple[Tokens, list[bool]]
"""The tokens of a text, and which of them are learnt."""

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # begins what the assistant says, in a chat template
_ADD_MARKS = "put {% generation %} and {% endgeneration %} around them in tokenizer.chat_template."


class _Answers(Examples):
    """Rows of one text each, of which some tokens are learnt."""

    warnings: tuple[str, ...]

    def _set_rows(self, found: list[Masked], tokenizer: Tokenizer, length: int, loss: str) -> None:
        notices = Notices()
        if cut := [index for index, (tokens, _) in enumerate(found) if len(tokens) > length]:
            notices.add(
                f"{len(cut)} of {len(found)} {self.kind}s are longer than {length} tokens, and their ends are cut off, "
                f"as number {cut[0]}, which has {len(found[cut[0]][0])}. Give the length that you trained with."
            )
        rows, weights = [], []
        for index, (tokens, mask) in enumerate(found):
            learnt = [bool(place and is_learnt) for place, is_learnt in enumerate(mask[:length])]
            if not any(learnt):
                raise DataError(
                    f"{self.kind} {index} has no token to learn within its first {length}: leave it out, or give a "
                    "larger length."
                )
            weight = 1.0 if loss == "sum" else 1 / sum(learnt)
            rows.append(tokens[:length])
            weights.append([weight * each for each in learnt])
        warn_of_padding(rows, "cuts off the ends of longer ones, so leave those out", lambda size, length: 1)
        self.columns, self.documents = pad_rows(rows, weights), torch.arange(len(rows))
        self.warnings, self._rows, self._tokenizer, self._count = notices.messages, rows, tokenizer, len(rows)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each example, prompt and answers, for reports and guesses by common words."""
        return [str(self._tokenizer.decode(row)) for row in self._rows]

    def __repr__(self) -> str:
        learnt = int((self.columns["weights"] != 0).sum())
        total = sum(map(len, self._rows))
        return f"{type(self).__name__}({len(self)}, {learnt} of {total} tokens learnt)"


class Conversations(_Answers):
    """Chats to train on: each conversation is one training example, of which the assistant's tokens are learnt.

    conversations: lists of messages, {"role": "user", "content": "…"}, such as the column "messages" of a dataset. The
        tokenizer's chat template renders them. If it marks what the assistant generates ({% generation %}), exactly
        that is learnt. Otherwise all that a message of the assistant adds to the rendered text is learnt, the end of
        its turn included, but not the header that asks for it. Templates that change earlier messages when later ones
        come are refused then.
    length: tokens of a row, by default the tokenizer's context, at most 1,024. What goes beyond is cut off, with a
        warning, which `warnings` keeps.
    loss: "mean", so that every conversation counts the same, or "sum" over the learnt tokens, as a Trainer weighs them.
        With "sum", gradients are larger than a Trainer's by the number of learnt tokens per conversation: divide its
        learning rate by that.
    """

    kind = "conversation"

    def __init__(
        self,
        conversations: Sequence[Sequence[Message]],
        tokenizer: Tokenizer,
        *,
        length: int | None = None,
        loss: Literal["mean", "sum"] = "mean",
    ) -> None:
        refuse_loss(loss)
        found = [
            _render(chat, tokenizer, f"conversation {i}") for i, chat in enumerate(_check(conversations, tokenizer))
        ]
        self._set_rows(found, tokenizer, check_length(length, tokenizer), loss)


class Instructions(_Answers):
    """Pairs of a prompt and its answer to train on, as plain texts: the answer and the end of text are learnt.

    Prompt and answer are tokenised together, so whatever is between them, such as a line break, must be in one of them.
    A token that spans the two is learnt. The tokenizer's end-of-text token, if it has one, follows every answer that
    does not end with it.

    length, loss: as of `Conversations`.
    """

    kind = "pair"

    def __init__(
        self,
        prompts: Sequence[str],
        answers: Sequence[str],
        tokenizer: Tokenizer,
        *,
        length: int | None = None,
        loss: Literal["mean", "sum"] = "mean",
    ) -> None:
        refuse_tokenizer(tokenizer)
        refuse_loss(loss)
        prompts, answers = check_texts(prompts, "prompts"), check_texts(answers, "answers")
        if len(prompts) != len(answers):
            raise DataError(f"every prompt needs its answer: {len(prompts)} prompts, {len(answers)} answers.")
        end = getattr(tokenizer, "eos_token_id", None)
        found: list[Masked] = []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            before, after = split_completion(tokenizer, prompt, answer, f"pair {index}")
            if end is not None and after[-1] != end:
                after = [*after, end]
            found.append((before + after, [False] * len(before) + [True] * len(after)))
        self._set_rows(found, tokenizer, check_length(length, tokenizer), loss)


def render_queries(conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer) -> list[Masked]:
    """Return the tokens of each conversation, and which of them count: those of its last message that are learnt."""
    found = []
    for index, chat in enumerate(_check(conversations, tokenizer)):
        whose, last = f"query {index}", chat[-1]
        if last["role"] != "assistant":
            raise DataError(
                f"{whose} ends with a message of {last['role']!r}: the last message of a query is the assistant's, "
                "whose log-likelihood is attributed."
            )
        if not last["content"] and not last.get("tool_calls"):
            raise DataError(f"the last message of {whose} is empty: there is nothing to attribute.")
        tokens, learnt = _render(chat, tokenizer, whose)
        begins = _begin_last(chat, tokens, tokenizer, whose)
        counts = [place >= begins and is_learnt for place, is_learnt in enumerate(learnt)]
        if not any(counts):
            raise DataError(
                f"the chat template marks no token in the last message of {whose} as the assistant's: there is nothing "
                "to attribute."
            )
        if counts[0]:
            raise DataError(f"{whose} has no token before the assistant's last message: give it a prompt.")
        stop = len(counts) - counts[::-1].index(True)  # after the last token that counts
        found.append((tokens[:stop], counts[:stop]))
    return found


def _begin_last(chat: list[Message], whole: Tokens, tokenizer: Any, whose: str) -> int:
    """Return the place in a conversation where its last message begins: where those before it end.

    The last token of those may be another one alone: the end of a text, or one that merges with what follows.
    """
    before = _apply(chat[:-1], tokenizer, whose)["input_ids"] if chat[:-1] else []
    begins = _shared(before, whole)
    if begins < len(before) - 1:
        raise DataError(
            f"the chat template renders {whose} without its last message in another way than as a part of the whole, "
            "so it does not show where that message begins: use a template that leaves earlier messages as they are."
        )
    return begins


def _check(conversations: Sequence[Sequence[Message]], tokenizer: Any) -> list[list[Message]]:
    """Return conversations as lists of messages; refuse what is none, and a tokenizer without a chat template."""
    refuse_tokenizer(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template: use that of a chat model, set tokenizer.chat_template to the template "
            "you trained with, or give texts to language.Instructions."
        )
    chats = [list(chat) if isinstance(chat, Sequence) else [] for chat in conversations]
    if not chats:
        raise DataError("there are no conversations: the list is empty.")
    for index, chat in enumerate(chats):
        if not chat or not all(isinstance(each, Mapping) and {"role", "content"} <= set(each) for each in chat):
            raise DataError(
                f'conversation {index} must be a list of messages such as {{"role": "user", "content": "…"}}.'
            )
        if not any(message["role"] == "assistant" for message in chat):
            raise DataError(
                f'conversation {index} has no message of role "assistant", so nothing to learn: leave it out.'
            )
    return chats


def _render(chat: list[Message], tokenizer: Any, whose: str) -> Masked:
    """Return the tokens of a conversation, and which of them the assistant generates."""
    if _MARK.search(str(tokenizer.chat_template)):
        found = _apply(chat, tokenizer, whose, return_assistant_tokens_mask=True)
        mask = list(map(bool, found["assistant_masks"]))
    else:
        found = _apply(chat, tokenizer, whose)
        mask = _mask_turns(chat, found["input_ids"], tokenizer, whose)
    if not any(mask):
        raise DataError(f"the chat template marks no token of {whose} as the assistant's: there is nothing to learn.")
    return found["input_ids"], mask


def _mask_turns(chat: list[Message], whole: Tokens, tokenizer: Any, whose: str) -> list[bool]:
    """Mark what each message of the assistant adds to the conversation before it.

    The last token of the prompt for a generation may merge with the beginning of the message, and is learnt then.
    """
    mask = [False] * len(whole)
    for turn, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = _prompt(chat[:turn], tokenizer, whose)
        after = _apply(chat[: turn + 1], tokenizer, whose)["input_ids"]
        start = _shared(before, after)
        if start < max(1, len(before) - 1) or whole[: len(after)] != after or start >= len(after):
            raise DataError(
                f"the chat template renders {whose} up to message {turn} in another way than as a part of the whole, "
                f"so it does not show which tokens are the assistant's: {_ADD_MARKS}"
            )
        mask[start : len(after)] = [True] * (len(after) - start)
    return mask


def _prompt(chat: list[Message], tokenizer: Any, whose: str) -> Tokens:
    """Return the tokens of a conversation with the header that asks the assistant for the next message."""
    try:
        return list(_apply(chat, tokenizer, whose, add_generation_prompt=True)["input_ids"])
    except DataError as error:
        if chat:
            raise
        raise DataError(
            f"{whose} begins with the assistant, and the chat template does not render the header before its first "
            f"message alone, so it does not show which tokens are the assistant's: {_ADD_MARKS}"
        ) from error


def _shared(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _apply(chat: list[Message], tokenizer: Any, whose: str, **options: Any) -> dict[str, Any]:
    asked: Any = chat or [chat]  # transformers renders a chat without messages in a batch only
    try:
        found = tokenizer.apply_chat_template(asked, tokenize=True, return_dict=True, **options)
    except Exception as error:  # of the template, which is the user's
        raise DataError(f"the chat template does not take {whose}: {first_line(error)}.") from error
    names = [name for name in ("input_ids", "assistant_masks") if name in found]
    return {name: list(found[name] if chat else found[name][0]) for name in names}
