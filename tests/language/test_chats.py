"""Of a chat, the assistant's tokens are learnt and no others; of an instruction, its answer."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import default_data_collator

from imprint import DataError, Plan, attribute, simulate
from imprint.errors import ReliabilityWarning
from imprint.language import Completions, Conversations, Instructions, task
from tests.language.models import gpt2, llama, tokenizer

TURN = "{{ '<|' + m['role'] + '|>' }}{{ m['content'] + '<|end|>' }}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|end|>' }}{% else %}{{ m['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}"
)
FORGETFUL = PLAIN.replace("in messages", "in messages[-3:]")  # earlier messages disappear when later ones come
SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ 'the wind is<|end|>' }}{% endif %}"  # a default
CHATS = [
    [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}],
    [
        {"role": "user", "content": "a ship"},
        {"role": "assistant", "content": "sails"},
        {"role": "user", "content": "over"},
        {"role": "assistant", "content": "the sea"},
    ],
    [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "sat"}],
]


def chat_tokenizer(template: str = PLAIN) -> Any:
    tokens = tokenizer(eos_token="<|end|>", bos_token="<|user|>", pad_token="<|assistant|>")
    tokens.chat_template = template
    return tokens


def learnt(examples: Conversations | Instructions, tokens: Any, row: int) -> list[str]:
    """The runs of tokens that are learnt in a row, as texts."""
    runs: list[list[int]] = [[]]
    for token, weight in zip(
        examples.columns["input_ids"][row].tolist(), examples.columns["weights"][row], strict=True
    ):
        if weight:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokens.decode(run) for run in runs if run]


def test_what_the_assistant_says_is_learnt_to_the_end_of_its_turn() -> None:
    tokens = chat_tokenizer()
    chats = Conversations(CHATS, tokens, length=24)
    assert [learnt(chats, tokens, row) for row in range(3)] == [
        ["sat on the mat<|end|>"],
        ["sails<|end|>", "the sea<|end|>"],
        ["sat<|end|>"],
    ]
    assert chats.texts[0] == "<|user|>the cat<|end|><|assistant|>sat on the mat<|end|>"
    assert torch.allclose(chats.columns["weights"].sum(1), torch.ones(3))
    assert len(chats) == 3


def test_the_marks_of_a_template_decide_where_it_has_them() -> None:
    tokens = chat_tokenizer(MARKED)
    chats = Conversations(CHATS, tokens, length=24)
    assert [learnt(chats, tokens, row) for row in range(3)] == [["sat on the mat"], ["sails", "the sea"], ["sat"]]


def test_a_token_that_spans_the_header_and_the_message_is_learnt() -> None:
    spaced = PLAIN.replace("'|>'", "'|> '").replace("'<|assistant|>'", "'<|assistant|> '")
    tokens = chat_tokenizer(spaced)
    asked = tokens("<|assistant|> ")["input_ids"]
    assert tokens("<|assistant|> sat")["input_ids"][: len(asked)] != asked  # so that the space is merged
    assert learnt(Conversations(CHATS[:1], tokens, length=24), tokens, 0) == [" sat on the mat<|end|>"]


def test_a_default_system_prompt_is_not_learnt() -> None:
    tokens = chat_tokenizer(SYSTEM + PLAIN)
    chats = Conversations(CHATS[2:], tokens, length=24)
    assert chats.texts[0].startswith("the wind is<|end|><|user|>the dog")
    assert learnt(chats, tokens, 0) == ["sat<|end|>"]


GREETING = [{"role": "assistant", "content": "the cat"}, *CHATS[0]]  # a chat that the assistant begins


def test_the_header_of_a_chat_that_the_assistant_begins_is_not_learnt() -> None:
    worded = PLAIN.replace("'|>'", "'|>the dog<|end|>'").replace("'<|assistant|>'", "'<|assistant|>the dog<|end|>'")
    tokens = chat_tokenizer(worded)
    chats = Conversations([GREETING], tokens, length=48)
    assert learnt(chats, tokens, 0) == ["the cat<|end|>", "sat on the mat<|end|>"]
    always = chat_tokenizer("{{ 'the wind is<|end|>' }}" + PLAIN)  # a system prompt even before the first message
    chats = Conversations([GREETING], always, length=48)
    assert learnt(chats, always, 0) == ["the cat<|end|>", "sat on the mat<|end|>"]


BEGINNINGS = {
    "fails without messages": (SYSTEM + PLAIN, "begins with the assistant, and the chat template does not render"),
    "renders something else": (
        SYSTEM.replace("{% if ", "{% if messages and ") + PLAIN,
        "up to message 0 in another way",
    ),
    "has no header of its own": (PLAIN.partition("{% if add")[0], "up to message 0 in another way"),
}


@pytest.mark.parametrize(("template", "reason"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_where_the_first_header_is_not_shown_marks_are_asked_for(template: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"{reason}.*put {{% generation %}}"):
        Conversations([GREETING], chat_tokenizer(template), length=48)


def test_rows_are_what_a_trainer_learns_from() -> None:
    model, tokens = llama(), chat_tokenizer()
    chats = Conversations(CHATS, tokens, length=24, loss="sum")
    batch = default_data_collator(chats.rows)
    theirs = model(**batch).loss  # of transformers: a mean over the labels that are not −100
    count = int((batch["labels"][:, 1:] != -100).sum())
    ours = task(model, tokens).loss(model, chats.columns).sum()
    torch.testing.assert_close(ours / count, theirs.double())


def test_the_gradients_of_a_sum_are_a_trainers_times_the_learnt_tokens_of_a_chat() -> None:
    model, tokens = gpt2().eval(), chat_tokenizer()
    batch = default_data_collator(Conversations(CHATS, tokens, length=24).rows)
    theirs = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    each = int((batch["labels"][:, 1:] != -100).sum()) / len(CHATS)
    for loss, factor, agrees in (("sum", each, True), ("mean", 1, False)):
        chats: Any = Conversations(CHATS, tokens, length=24, loss=loss)  # type: ignore[arg-type]
        ours = torch.autograd.grad(task(model, tokens).loss(model, chats.columns).mean(), list(model.parameters()))
        pairs = zip(ours, theirs, strict=True)
        assert all(torch.allclose(own, factor * other, rtol=1e-4, atol=1e-7) for own, other in pairs) is agrees


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_loss_is_of_the_assistants_tokens_alone(loss: Any) -> None:
    model, tokens = gpt2().eval(), chat_tokenizer()
    chats = Conversations(CHATS, tokens, length=24, loss=loss)
    found = task(model, tokens).loss(model, chats.columns)
    for row, chat in enumerate(CHATS):
        ids, counted = [], []
        for message in chat:  # by hand, from the parts of the text
            header = tokens(f"<|{message['role']}|>")["input_ids"]
            content = tokens(message["content"] + "<|end|>")["input_ids"]
            ids += header + content
            counted += [False] * len(header) + [message["role"] == "assistant"] * len(content)
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        each = [-log_probs[place - 1, ids[place]] for place in range(1, len(ids)) if counted[place]]
        expected = sum(each) if loss == "sum" else sum(each) / len(each)
        torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=0)  # weights are in float32


def test_the_last_turn_of_a_conversation_is_asked() -> None:
    model, tokens = gpt2().eval(), chat_tokenizer()
    queries = Completions.from_messages(CHATS, tokens)
    measured = task(model, tokens).measure(model, queries.columns)
    for row, (chat, last) in enumerate(zip(CHATS, ("sat on the mat", "the sea", "sat"), strict=True)):
        before = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in chat[:-1]) + "<|assistant|>"
        prompt, answer = tokens(before)["input_ids"], tokens(last + "<|end|>")["input_ids"]
        log_probs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        expected = sum(log_probs[len(prompt) + i - 1, token] for i, token in enumerate(answer))
        torch.testing.assert_close(measured[row], expected)
        assert queries.texts[row] == before + last + "<|end|>"


def test_answers_are_learnt_with_the_end_of_text() -> None:
    tokens = chat_tokenizer()
    pairs = Instructions(["the cat", "a ship"], [" sat on", " sails<|end|>"], tokens, length=24)
    assert [learnt(pairs, tokens, row) for row in range(2)] == [[" sat on<|end|>"], [" sails<|end|>"]]
    assert pairs.texts == ["the cat sat on<|end|>", "a ship sails<|end|>"]
    assert pairs.rows[0]["labels"][0] == -100
    without_end = tokenizer()
    assert learnt(Instructions(["the cat"], [" sat on"], without_end, length=24), without_end, 0) == [" sat on"]


def test_chats_are_attributed_to_who_wrote_them() -> None:
    model, tokens = gpt2().eval(), chat_tokenizer()
    chats, asked = Conversations(CHATS, tokens, length=24), task(model, tokens)
    sources = chats.sources(["ann", "ben", "ann"])
    assert [members.tolist() for members in sources.members] == [[0, 2], [1]]
    queries = Completions.from_messages(CHATS[:2], tokens).columns
    store = simulate(asked, chats.columns, sources, Plan(steps=1, lr=0.01), progress=False)
    scores = attribute(asked, store, queries).scores
    losses, parameters = asked.loss(model, chats.columns), list(model.parameters())
    pull = torch.autograd.grad(losses.mean(), parameters, retain_graph=True)
    moved = deepcopy(model)  # where the one step of the base path leads, and scores are read
    with torch.no_grad():
        for parameter, slope in zip(moved.parameters(), pull, strict=True):
            parameter -= 0.01 * slope
    for source, members in enumerate(sources.members):
        own = torch.autograd.grad(losses[torch.from_numpy(members)].sum(), parameters, retain_graph=True)
        for query, value in enumerate(asked.measure(moved, queries)):
            wanted = torch.autograd.grad(value, list(moved.parameters()), retain_graph=True)
            expected = -0.01 * sum((f * g).sum() for f, g in zip(wanted, own, strict=True))
            torch.testing.assert_close(scores[query, source], expected, rtol=1e-8, atol=1e-12)


def test_a_template_that_rewrites_earlier_messages_is_refused() -> None:
    with pytest.raises(DataError, match="conversation 1 up to message 1 in another way"):
        Conversations(CHATS, chat_tokenizer(FORGETFUL), length=24)


REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ([], "there are no conversations"),
    "no messages": ([[]], "conversation 0 must be a list of messages"),
    "texts": (["hello"], "conversation 0 must be a list of messages"),
    "no assistant": ([CHATS[0][:1]], 'conversation 0 has no message of role "assistant"'),
}


@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_conversation_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Conversations(given, chat_tokenizer())


def test_a_tokenizer_without_a_template_and_one_that_fails_are_refused() -> None:
    with pytest.raises(DataError, match="no chat template"):
        Conversations(CHATS, tokenizer())
    with pytest.raises(DataError, match=r"does not take conversation 0: .*roles must alternate"):
        Conversations(CHATS, chat_tokenizer("{{ raise_exception('roles must alternate') }}"))


def test_a_query_ends_with_the_assistant() -> None:
    with pytest.raises(DataError, match="query 0 ends with a message of 'user'"):
        Completions.from_messages([CHATS[1][:3]], chat_tokenizer())


def counted(queries: Completions, tokens: Any, row: int) -> str:
    return str(tokens.decode(queries.columns["input_ids"][row][queries.columns["weights"][row] > 0].tolist()))


def test_an_empty_last_message_is_refused_and_no_earlier_turn_is_asked_instead() -> None:
    for content in ("", None):
        empty: list[Any] = [*CHATS[1][:3], {"role": "assistant", "content": content}]
        for template in (PLAIN, MARKED):
            with pytest.raises(DataError, match="the last message of query 0 is empty: there is nothing to attribute"):
                Completions.from_messages(
                    [empty], chat_tokenizer(template.replace("m['content']", "(m['content'] or '')"))
                )
    trimmed = MARKED.replace("m['content']", "m['content'] | trim")
    with pytest.raises(DataError, match="marks no token in the last message of query 0"):
        Completions.from_messages([[*CHATS[1][:3], {"role": "assistant", "content": " "}]], chat_tokenizer(trimmed))


def test_all_marked_parts_of_the_last_message_count_and_none_of_earlier_ones() -> None:
    again = "{{ '<|user|>' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    tokens = chat_tokenizer(MARKED.replace("{% endgeneration %}", "{% endgeneration %}" + again))
    queries = Completions.from_messages(CHATS, tokens)
    assert [counted(queries, tokens, row) for row in range(3)] == ["sat on the mat" * 2, "the sea" * 2, "sat" * 2]
    bare = chat_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )  # one message runs into the next
    said = [*CHATS[0], {"role": "assistant", "content": "<|end|>the sea"}]
    assert counted(Completions.from_messages([said], bare), bare, 0) == "<|end|>the sea"


def test_a_template_that_hides_where_the_last_message_begins_is_refused() -> None:
    forgetful = chat_tokenizer(MARKED.replace("in messages", "in messages[-3:]"))
    with pytest.raises(DataError, match="query 0 without its last message in another way"):
        Completions.from_messages([[*CHATS[0], *CHATS[1]]], forgetful)


def test_long_conversations_are_cut_and_say_so() -> None:
    tokens = chat_tokenizer()
    with pytest.warns(ReliabilityWarning, match="1 of 3 conversations are longer than 12 tokens"):
        chats = Conversations(CHATS, tokens, length=12)
    assert len(chats.warnings) == 1
    assert chats.columns["input_ids"].shape[1] == 12
    with pytest.warns(ReliabilityWarning), pytest.raises(DataError, match="has no token to learn within its first 2"):
        Conversations(CHATS, tokens, length=2)
