"""Scores per token add up to the completion's own, and are shown as readable words."""

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from imprint import DataError, ReadoutError, SourcesError, Store, TaskError, attribute
from imprint.attribution.labels import Labels
from imprint.attribution.noise import describe_noise
from imprint.errors import ReliabilityWarning
from imprint.language import (
    Completions,
    LanguageTask,
    TokenAttribution,
    describe_credits,
    render_page,
    task,
    token_scores,
)
from imprint.readout.reader import Reader
from tests.language.models import documents, gpt2, tokenizer
from tests.language.test_task import simulated

PROMPT, COMPLETION = "the café", " sails naïve 🚢 ships"


@pytest.fixture(scope="module")
def made() -> tuple[LanguageTask, Store]:
    language = task(gpt2(), parameters="last:1")
    return language, simulated(language, documents().columns)


def shown(**labels: Any) -> TokenAttribution:
    """Two sources and four tokens with plain numbers."""
    given = {"n": 10, "source_ids": ("a", "b"), "source_names": ("<Alpha> & co", "Beta"), "source_sizes": (1, 1)}
    scores = torch.tensor([[10.0, 0.0], [-20.0, 1.0], [30.0, -2.0], [0.0, 0.0]])
    found = Labels(**{**given, "measure": "log-likelihood", "better": "higher", **labels})
    return TokenAttribution(found, "Say <b>", (" one", " tw", "o", "\n<i>"), scores)


def sentence_pieces() -> Any:
    """Return a tokenizer that begins every word with "▁" and takes the first one away when it decodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<s>", "</s>", "<unk>", "▁", "▁the", "▁old", "▁ship", "ship", "the", "old", "▁sails"]
    pieces: Any = Tokenizer(models.Unigram([(each, -1.0) for each in known], unk_id=2))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("end", [[], [1]])
def test_an_answer_given_as_tokens_is_the_one_that_was_said(made: tuple[LanguageTask, Store], end: list[int]) -> None:
    language, store = made
    tokens, given, said = sentence_pieces(), [4, 5], [6, 10, 4]
    retold = Completions([tokens.decode(given)], [tokens.decode(said)], tokens)
    assert retold.columns["input_ids"][0].tolist() != given + said  # the space before the answer is lost
    exact = Completions.from_tokens([(torch.tensor(given), said + end), (given, [7])], tokens)
    assert exact.columns["input_ids"].tolist() == [[4, 5, 6, 10, 4], [4, 5, 7, 0, 0]]
    assert exact.columns["weights"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert exact.texts == ["the old ship sails the", "the oldship"]
    found = token_scores(language, store, given, torch.tensor(said + end), tokens)
    assert (found.prompt, found.tokens) == ("the old", (" ship", " sails", " the"))
    one = Completions.from_tokens([(given, said)], tokens)
    assert found.log_probs is not None
    torch.testing.assert_close(found.log_probs.sum(), Reader(language, store).values(one.columns, 1)[0].cpu())
    torch.testing.assert_close(found.completion.scores, attribute(language, store, one, progress=False).scores)


def test_an_answer_as_text_or_as_the_tokens_of_its_text_has_the_same_scores(made: tuple[LanguageTask, Store]) -> None:
    language, store = made
    tokens = tokenizer()
    whole, before = tokens(PROMPT + COMPLETION)["input_ids"], len(tokens(PROMPT)["input_ids"])
    one = token_scores(language, store, PROMPT, COMPLETION, tokens)
    two = token_scores(language, store, whole[:before], whole[before:], tokens)
    assert torch.equal(one.scores, two.scores)
    assert (one.prompt, one.tokens) == (two.prompt, two.tokens)


def test_the_beginning_of_a_text_is_given_to_the_model_and_not_shown(made: tuple[LanguageTask, Store]) -> None:
    language, store = made
    tokens = sentence_pieces()
    assert Completions.from_tokens([([0, 4, 5], [6])], tokens).texts == ["the old ship"]
    found = token_scores(language, store, [0, 4, 5], [6], tokens)
    assert found.prompt.strip() == "the old" and found.tokens == (" ship",)
    assert not torch.equal(found.scores, token_scores(language, store, [4, 5], [6], tokens).scores)


def test_answers_that_are_none_are_refused_by_number(made: tuple[LanguageTask, Store]) -> None:
    language, store = made
    tokens = sentence_pieces()
    with pytest.raises(DataError, match="the model said nothing in answer 1: leave it out"):
        Completions.from_tokens([([4], [5]), ([4], [1])], tokens)
    with pytest.raises(DataError, match="the model was given no token in answer 0"):
        Completions.from_tokens([([], [5])], tokens)
    with pytest.raises(DataError, match="got -100 among them"):
        Completions.from_tokens([([4], [5, -100])], tokens)
    with pytest.warns(ReliabilityWarning, match="answer 0 begins with all tokens that the model was given"):
        assert len(Completions.from_tokens([([4, 5], [4, 5, 6])], tokens).warnings) == 1
    assert not Completions.from_tokens([([4], [4, 6])], tokens).warnings  # one word said again
    with pytest.warns(ReliabilityWarning, match="begins with all tokens"):
        Completions.from_tokens([([0], [0, 4])], tokens)  # and the beginning of a text is never said
    with pytest.raises(DataError, match="there are no answers"):
        Completions.from_tokens([], tokens)
    with pytest.raises(DataError, match=r"one after the other, got a tensor of shape \(1, 2\)"):
        Completions.from_tokens([(torch.tensor([[4, 5]]), [5])], tokens)
    with pytest.raises(DataError, match="as the numbers of its tokens, one after the other, got a text"):
        Completions.from_tokens([("the", "old")], tokens)  # type: ignore[list-item]
    with pytest.raises(DataError, match="both as texts, or both as token ids"):
        token_scores(language, store, "the", [5], tokens)


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
def test_tokens_add_up_to_the_completion(made: tuple[LanguageTask, Store], readout: Any) -> None:
    language, store = made
    tokens = tokenizer()
    options = {"step": 1e-4} if readout == "central" else {}
    found = token_scores(language, store, PROMPT, COMPLETION, tokens, readout=readout, **options)
    queries = Completions([PROMPT], [COMPLETION], tokens)
    whole = attribute(language, store, queries.columns, progress=False)
    assert found.scores.shape == (int(queries.columns["weights"].sum()), len(store)) == (len(found.tokens), 3)
    torch.testing.assert_close(found.scores.sum(0), whole.scores[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.removal_effect.sum(0), whole.removal_effect[0], rtol=1e-4, atol=1e-6)
    assert found.labels.details["readout"] == readout
    assert found.labels.unit == whole.labels.unit
    assert language.measure_name == "log-likelihood"  # the task given is left as it is
    assert attribute(language, store, queries.columns, progress=False).scores.shape == (1, 3)


def test_bytes_join_into_characters(made: tuple[LanguageTask, Store]) -> None:
    found = token_scores(*made, PROMPT, COMPLETION, tokenizer())
    assert found.prompt == PROMPT
    assert "".join(found.tokens) == COMPLETION
    assert "" in found.tokens  # 🚢 is four bytes, and here as many tokens
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found.tokens)
    assert [word for word, _ in found.words()] == [" sails", " naïve", " 🚢", " ships"]
    assert sum(value for _, value in found.words()) == pytest.approx(-found.top(1)[0][1])


def test_a_store_may_be_a_folder(made: tuple[LanguageTask, Store], tmp_path: Path) -> None:
    language, store = made
    assert torch.equal(
        token_scores(language, store.path, "a", " ship", tokenizer()).scores,
        token_scores(language, store, "a", " ship", tokenizer()).scores,
    )


def test_words_have_what_a_source_contributes_to_them() -> None:
    found = shown()
    assert found.words() == [(" one", 1.0), (" two", 1.0), ("\n<i>", 0.0)]
    assert found.words("Beta") == found.words("b") == [(" one", 0.0), (" two", pytest.approx(-0.1)), ("\n<i>", 0.0)]
    assert found.top() == [("<Alpha> & co", -2.0), ("Beta", pytest.approx(0.1))]
    with pytest.raises(SourcesError, match="there is no source 'c'; known names: <Alpha> & co, Beta"):
        found.words("c")


def test_the_page_stands_alone_and_escapes_what_it_shows() -> None:
    page = shown().to_html()
    assert page.startswith("<!doctype html>")
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)
    assert "<b>" not in page
    assert "Say &lt;b&gt;" in page
    assert "&lt;i&gt;" in page
    assert "&lt;Alpha&gt; &amp; co" in page
    assert "<Alpha>" not in page
    assert "nats" in page
    assert "change of log-likelihood if the source were removed: − means the source helps" in page


def test_a_completion_of_a_repeated_run_shows_question_noise_and_warnings() -> None:
    found = replace(shown(question="this_run", removes=True, warnings=("take <care>",)), noise_changes=torch.ones(2, 4))
    for text in (repr(found), found.to_html()):
        assert "this run: if this source had had weight 0 in the training run that produced this model" in text
        assert "Beta +0.1~" in re.sub("<[^>]*>", " ", text).replace("  ", " ")
        assert "~ not distinguishable from 0" in text
    assert found.completion.noise is not None and found.completion.noise.tolist() == [4.0]
    assert "warning: take <care>" in repr(found) and "warning: take &lt;care&gt;" in found.to_html()
    assert "~" not in repr(shown()) and "expected: mean over trainings like this one" in repr(shown())


def test_a_completion_has_the_error_of_its_sum_over_tokens(made: tuple[LanguageTask, Store]) -> None:
    language, store = made
    alone = token_scores(language, store, PROMPT, COMPLETION, tokenizer())
    assert alone.completion.standard_error is None and "standard errors unknown" in repr(alone)
    later = {name: 1.1 * tensor for name, tensor in language.state().items()}
    several = simulated(language, documents().columns, checkpoints=[[language.state()], [later]])
    found = token_scores(language, several, PROMPT, COMPLETION, tokenizer())
    whole = attribute(language, several, Completions([PROMPT], [COMPLETION], tokenizer()).columns, progress=False)
    torch.testing.assert_close(found.completion.standard_error, whole.standard_error, rtol=1e-3, atol=1e-7)
    assert "standard errors over 2 runs" in repr(found)
    for text in ("<th>± standard error</th>", "<td>± ", ", standard error ", "standard errors over 2 runs"):
        assert text in found.to_html() and text not in alone.to_html()
    assert "they say nothing about another seed" not in repr(found) + repr(alone) + found.to_html()


def test_signs_have_their_colours_and_size_their_strength() -> None:
    def shade(page: str, word: str) -> tuple[int, ...]:
        match = re.search(rf'background:rgb\((\d+),(\d+),(\d+)\)" title="[^"]*">{word}<', page)
        assert match is not None
        return tuple(map(int, match.groups()))

    alpha, beta = shown().to_html("a"), shown().to_html("Beta")
    red, _, blue = shade(alpha, "two")
    assert blue > red
    red, _, blue = shade(beta, "two")
    assert red > blue
    assert shade(beta, "one") == (255, 255, 255)


def test_the_terminal_shows_the_words_and_the_unit() -> None:
    console = Console(record=True, width=200, force_terminal=True, color_system="truecolor", file=StringIO())
    console.print(shown())
    styled = console.export_text(styles=True, clear=False)
    plain = console.export_text()
    assert "Say <b> one two\n<i>" in plain
    assert "in nats" in plain
    assert re.search(r"\x1b\[[^m]*48;2;[^m]*mtwo", styled)


def test_nothing_that_moves_is_shown_as_nothing() -> None:
    still = TokenAttribution(shown().labels, "", ("a",), torch.zeros(1, 2))
    assert "rgb(255,255,255)" in still.to_html()
    assert "tokens × 2 sources" in repr(still)
    assert "iframe" in still._repr_html_()


def test_a_run_that_is_chaotic_for_a_completion_says_so(
    made: tuple[LanguageTask, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = token_scores(*made, PROMPT, COMPLETION, tokenizer())
    assert "chaos" not in calm.labels.details
    effect = float(calm.removal_effect.sum(0).square().mean().sqrt())
    moved = torch.zeros(2, len(calm.tokens), dtype=torch.float64)
    moved[:, 0] = 0.5 * effect
    monkeypatch.setattr("imprint.readout.reader.Reader.noise_changes", lambda *_: moved)
    found = token_scores(*made, PROMPT, COMPLETION, tokenizer())
    assert found.labels.details["chaos"] == pytest.approx(0.5)
    assert any("this run is chaotic" in warning for warning in found.labels.warnings)


def test_a_tokenizer_that_is_not_the_tasks_is_refused() -> None:
    made = task(gpt2(), tokenizer())
    store = simulated(made, documents().columns)
    assert len(token_scores(made, store, "the ship", " sails", tokenizer()).tokens) > 0
    with pytest.raises(TaskError, match="this tokenizer is not the one that the task was made with"):
        token_scores(made, store, "the ship", " sails", tokenizer(bos_token="<s>"))


def test_without_a_source_words_are_those_of_the_source_that_helps() -> None:
    found = replace(shown(), scores=torch.tensor([[-10.0, 4.0], [-20.0, 2.0], [-30.0, -1.0], [0.0, 0.0]]))
    assert (found.strongest, found.most_helpful) == ("a", "b")
    assert found.words() == found.words("Beta") != found.words("a")
    credited = found.credited()
    assert credited.name == "Beta" and [word.text for word in credited] == [" one", " two"]
    assert [word.contribution for word in credited] == pytest.approx([0.4, 0.1])
    assert len(found.credited(1)) == 1 and found.credited(1)[0] == credited[0]
    assert len(found.credited(source="a")) == 0 and "less likely (-6 nats); words" in repr(found.credited(source="a"))
    assert repr(credited).startswith(
        "Beta makes this completion likelier (+0.5 nats); words that it makes likelier: on"
    )
    with pytest.raises(ReadoutError, match="credited lists at least 1 word, got k=0"):
        found.credited(0)


def test_words_of_white_space_are_listed_as_such() -> None:
    found = replace(shown(), tokens=("\n", "\n", " ", "\n"))
    assert r"words that it makes likelier: '\n\n \n' +2" in repr(found.credited())


def test_nobody_is_credited_where_no_source_helps() -> None:
    found = replace(shown(), scores=torch.tensor([[-10.0, 4.0], [0.0, -6.0], [0.0, 0.0], [0.0, 0.0]]))
    assert found.most_helpful == "b" and found.credited().words == ()
    assert [word.text for word in found.credited(source="b")] == [" one"]  # which was asked for
    assert "likelier because of" not in repr(found)


def test_words_within_the_noise_of_a_run_are_marked() -> None:
    """Noise moves the two tokens of "two" in opposite ways, so that the word is surer than either."""
    moved = torch.tensor([[0.6, 2.0, -1.9, 0.0], [-0.6, -2.0, 1.9, 0.0]])
    found = replace(shown(question="this_run", removes=True), noise_changes=moved)
    one, two, last = found.rate_words("a")
    assert (one.distinguishable, two.distinguishable, last.distinguishable) == (False, True, False)
    assert two.standard_error == pytest.approx(0.1) and one.format() == "+1~"
    credited = found.credited()
    assert [word.format() for word in credited] == ["+1~", "+1"]
    for text in (repr(credited), repr(found), found.to_html()):
        assert "~ not distinguishable from 0: less than twice the change" in text
    assert all(word.distinguishable is None for word in shown().rate_words("a"))


def test_all_that_is_shown_says_whether_it_was_validated_and_which_way_a_source_moves() -> None:
    hurts = replace(shown(), scores=-shown().scores)
    console = Console(record=True, width=200, file=StringIO())
    console.print(hurts)
    for text in (repr(hurts), console.export_text(), hurts.to_html(), repr(hurts.credited())):
        assert "not validated: these effects were not compared" in text
    console.print(hurts)
    for text in (console.export_text(), hurts.to_html(), repr(hurts.credited())):
        assert "Beta makes this completion likelier (+0.1 nats)" in text
        assert re.search(
            r"Alpha(>|&gt;) (&|&amp;) co moves the completion further the other way \(-2 nats\), so Beta", text
        )
        assert "so Beta does not stand out" in text
    assert re.search("co moves the completion further the other way", repr(hurts))
    assert "makes this completion likelier (+2 nats)" in shown().to_html()


class _Tags(HTMLParser):
    """Checks that every tag is closed where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_several_completions_are_one_valid_page_that_says_once_what_they_share() -> None:
    several = [shown(), replace(shown(), prompt="Another", scores=-shown().scores), shown()]
    page = render_page(several, [each.strongest for each in several])
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == [] and [tags.seen.count(tag) for tag in ("html", "body", "h1", "section", "h2")] == [
        *(1, 1, 1, 3, 3)
    ]
    assert "<h1>3 completions</h1>" in page and "Another" in page
    assert page.count("not validated") == 1 and page.count("expected: mean over trainings") == 1
    assert page.count("makes this completion less likely") == 1
    mixed = render_page([shown(), shown(warnings=("take care",))])
    assert mixed.count("warning: take care") == 1 and mixed.index("take care") < mixed.rindex("</section>")
    with pytest.raises(DataError, match="there are no completions to show"):
        render_page([])
    with pytest.raises(DataError, match="there must be one source for each completion: 3 and 1"):
        render_page(several, ["a"])
    assert render_page(several, "b").count("<h2>Beta ") == 3 and "<h1>Beta</h1>" in render_page(several, "b")


def test_page_and_terminal_show_the_source_that_is_credited() -> None:
    """Alpha helps one completion most; of the other it is the opponent, which moves it further."""
    several = [shown(), replace(shown(), prompt="Another", scores=-shown().scores)]
    headings = re.findall("<h2>(.*?)</h2>", render_page(several))
    assert headings == [escape(each.credited().headline) for each in several]
    assert [heading.split(" makes ")[0] for heading in headings] == ["&lt;Alpha&gt; &amp; co", "Beta"]
    for each in several:
        console = Console(record=True, width=200, file=StringIO())
        console.print(each)
        text = console.export_text()
        assert text.splitlines()[: len(each.credited().caveats) + 1] == [
            *(each.credited().headline, *each.credited().caveats)
        ]
        assert f"shaded by what {each.credited().name} contributes" in text


def test_an_opponent_moves_further_and_the_other_way() -> None:
    helped, hurt = shown(), replace(shown(), scores=-shown().scores)
    assert helped.find_opponent() is None and helped.credited().caveats == []
    for found, other in ((helped, ("b", "a")), (hurt, (None, "a"))):
        opponent = found.find_opponent(other[0])
        assert opponent is not None and opponent.name == found.name_source(other[1])
        assert opponent.total == found.total(other[1]) and found.find_opponent(other[1]) is None
    assert helped.credited(source="b").caveats == ["<Alpha> & co moves the completion further the other way (+2 nats)"]
    still = TokenAttribution(shown().labels, "", ("a",), torch.zeros(1, 2))
    assert still.find_opponent() is None and still.credited().caveats == ["no source makes this completion likelier"]
    unsure = replace(
        shown(question="this_run"), scores=-shown().scores, noise_changes=torch.tensor([[0.0, 3.0, 0.0, 0.0]])
    )
    assert "(-2~ nats)" in repr(unsure.credited()) and "\n~ not distinguishable from 0" in repr(unsure.credited(1))


def test_several_completions_are_described_with_what_they_share_once() -> None:
    errors = {"error": describe_noise(2)}
    run = replace(shown(question="this_run", details=errors), noise_changes=torch.full((2, 4), 1e-3))
    text = describe_credits([run, replace(run, prompt="Another", scores=-run.scores)], k=1)
    assert [line for line in text.splitlines() if not line.startswith("  ")] == [
        *("Say <b> one two <i>", "Another one two <i>", run.labels.meaning, run.labels.standing),
        f"{describe_noise(2)}; they say nothing about another seed",
    ]
    with pytest.raises(DataError, match="there are no completions to describe"):
        describe_credits([])


def test_contributions_stand_beside_the_log_likelihood_of_the_model_itself(made: tuple[LanguageTask, Store]) -> None:
    language, store = made
    found = token_scores(language, store, PROMPT, COMPLETION, tokenizer())
    queries = Completions([PROMPT], [COMPLETION], tokenizer())
    reader = Reader(language, store)
    assert found.total("ships").log_prob == pytest.approx(float(reader.values(queries.columns, 1)), rel=1e-5)
    words = found.rate_words("ships")
    assert sum(word.log_prob or 0.0 for word in words) == pytest.approx(found.total("ships").log_prob, rel=1e-5)
    assert f"nats; its log-likelihood is {found.total('ships').log_prob:.3g})" in repr(found.credited())
    assert found.to_html().count("; its log-probability is ") == len(words)
    assert "log-likelihood is" not in repr(shown().credited())


def test_results_name_queries_by_their_texts(made: tuple[LanguageTask, Store]) -> None:
    queries = Completions(["the cat", "a ship"], [" sat on", " sails"], tokenizer())
    result = attribute(*made, queries, progress=False)
    assert "\n  query 0 (the cat sat on): " in repr(result) and "query 1 (a ship sails): " in repr(result.top(2))
    assert "query 1 (a ship sails): " in repr(attribute(*made, queries, top=1, progress=False))
    plain = attribute(*made, queries.columns, progress=False)
    assert torch.equal(plain.scores, result.scores) and "\n  query 0: " in repr(plain)
    assert plain.labels.fingerprints == result.labels.fingerprints
