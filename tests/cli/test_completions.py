"""`attribute --completion` and `--tokens`: texts instead of queries."""

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imprint import attribute
from imprint.cli.app import app
from tests.cli.commands import Command, loaded

pytest.importorskip("transformers")
pytestmark = pytest.mark.wide

MODEL = """
import torch
from tests.language.models import gpt2, tokenizer as make
from imprint import Plan, language

torch.manual_seed(0)
{tokenizer} = make()
texts = ["the ship sails on", "a dog barks there", "the ship drifts on"]
documents = language.Documents(texts, {tokenizer}, length=12)
data, sources = documents.columns, documents.sources(["log", "kennel", "log"])
completions = language.Completions(["the ship", "a dog"], [" sails on", " barks"], {tokenizer})
queries, query_texts, example_texts = completions.columns, completions.texts, documents.texts
plan = Plan(steps=2, lr=0.1)
task = language.task(gpt2(){given}, parameters="last:1")
"""
TASK = ("--task", "model.py:task")
ASK = ("attribute", "runs/news", *TASK, "--prompt", "the ship", "--completion", " sails on")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, whose tokenizer the task knows, other.py, where nobody does, and the store runs/news."""
    place = tmp_path_factory.mktemp("texts")
    (place / "model.py").write_text(MODEL.format(tokenizer="words", given=", words"))
    (place / "beside.py").write_text(MODEL.format(tokenizer="tokenizer", given=""))
    (place / "other.py").write_text(MODEL.format(tokenizer="words", given=""))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", [*sys.path])
        result = CliRunner().invoke(app, ["simulate", "model.py:task", "--out", "runs/news"])
    assert result.exit_code == 0, result.output
    return place


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_completion_gets_the_scores_of_the_same_query(command: Command) -> None:
    model = loaded(Path("model.py"))
    expected = attribute(model.task, "runs/news", model.completions.columns, progress=False)
    for file in ("model.py", "beside.py"):  # the tokenizer is the task's, or stands in its file
        line = ("attribute", "runs/news", "--task", f"{file}:task", "--prompt", "the ship", "--completion", " sails on")
        found = command(*line, "--prompt", "a dog", "--completion", " barks", "--json").values
        assert found["query_labels"] == ["the ship sails on", "a dog barks"]
        for query, credits in enumerate(found["queries"]):
            for credit in credits:
                column = expected.labels.source_ids.index(credit["source"])
                assert credit["score"] == pytest.approx(float(expected.scores[query, column]), rel=1e-4)


def test_tables_and_files_name_the_queries_of_the_tasks_file(command: Command, tmp_path: Path) -> None:
    shown = command("attribute", "runs/news", *TASK, "--out", tmp_path / "scores.csv")
    assert "│ 0: the ship sails on │" in shown.out and "│ 1: a dog barks" in shown.out
    assert (tmp_path / "scores.csv").read_text().splitlines()[1].endswith(",the ship sails on")
    others = command("attribute", "runs/news", *TASK, "--queries", "model.py:queries")
    assert "the ship sails on" not in others.out  # texts in the file are those of its own queries


def test_words_add_up_to_the_completion(command: Command, tmp_path: Path) -> None:
    found = command(*ASK, "--tokens", "--source", "kennel", "--json").values
    whole = {credit["source"]: credit["removal_effect"] for credit in found["queries"][0]}
    assert found["shaded_by"] == "kennel" and [word for word, _ in found["words"]] == [" sails", " on"]
    assert sum(value for _, value in found["words"]) == pytest.approx(-whole["kennel"], rel=1e-4)
    shown = command(*ASK, "--tokens", "--out", tmp_path / "words.html")
    assert "effect of removal, whole completion" in shown.out and "the ship sails on" in shown.out
    page = (tmp_path / "words.html").read_text()
    assert "<!doctype html>" in page and "word by word" in page


def test_words_of_several_completions_are_shown_and_written_to_one_page(command: Command, tmp_path: Path) -> None:
    line = (*ASK, "--prompt", "a dog", "--completion", " barks", "--tokens")
    found = command(*line, "--json").values["completions"]
    assert [[word for word, _ in each["words"]] for each in found] == [[" sails", " on"], [" barks"]]
    shown = command(*line, "--out", tmp_path / "words.html")
    assert shown.out.count("Word by word: ") == 2
    page = (tmp_path / "words.html").read_text()
    assert page.count("<!doctype html>") == 1 and page.count("<section>") == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--prompt a", "--prompt needs a --completion to attribute."),
        ("--tokens", "--tokens needs a --completion to attribute."),
        ("--completion a --queries model.py:queries", "give --queries or --completion, not both."),
        ("--prompt a --completion b --completion c", "in the same order: there are 1 and 2."),
        ("--completion b --source log", "--source chooses whose words are shaded: it goes with --tokens."),
        ("--completion b --out x.html", "--out must end in .csv or .safetensors (or .html, with --tokens), got x.html"),
        ("--completion b --tokens --out x.csv", "--out must end in .html, with --tokens, got x.csv."),
        ("--prompt a --completion ' b' --tokens --source kenel", "there is no source 'kenel'; did you mean kennel?"),
    ],
)
def test_texts_that_do_not_fit_are_refused(line: str, says: str, command: Command) -> None:
    failed = command("attribute", "runs/news", *TASK, *shlex.split(line))
    assert (failed.code, failed.out) == (1, "") and says in failed.err


def test_texts_need_a_language_model_and_its_tokenizer(command: Command, made: Path) -> None:
    line = ("attribute", "runs/news", "--task", "other.py:task", "--prompt", "a", "--completion", " sails")
    assert "the tokenizer is unknown: give it to language.task(model, tokenizer), or define" in command(*line).err
    failed = command("attribute", made / "runs/news", "--task", f"{made}/model.py:task", "--completion", "x")
    assert "--completion is for language models, as imprint.language.task makes their tasks" in failed.err


def test_words_of_a_hostile_text_do_not_reach_the_terminal(command: Command) -> None:
    shown = command(
        "attribute", "runs/news", *TASK, "--prompt", "a\x1b[2J", "--completion", " b\x1b]0;x\x07", "--tokens"
    )
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out and "\x07" not in shown.out


def test_the_documents_of_a_source_are_shown_and_written(command: Command, tmp_path: Path) -> None:
    """The file's `documents` are `language.Documents`: its windows belong to three texts, two of them of the log."""
    line = ("inside", "runs/news", "log", *TASK, "--keep", tmp_path / "log")
    found = command(*line, "--json").values
    assert found["source"] == "log" and {credit["source"] for credit in found["queries"][0]} == {"0", "2"}
    asked = command(*line, "--prompt", "the ship", "--completion", " sails on", "--out", tmp_path / "log.html")
    assert "Inside log: 2 documents" in asked.out and "0: the ship sails on" in asked.out
    assert "the ship drifts on" in (tmp_path / "log.html").read_text()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("inside runs/news lag --task model.py:task", "there is no source 'lag'; did you mean log?"),
        ("inside runs/news log --task model.py:task --out x.txt", "--out must end in .html, got x.txt."),
        ("inside runs/news log --task regrouped.py:task", "these are not the sources that runs/news was made with"),
    ],
)
def test_a_source_that_cannot_be_looked_into_is_refused(line: str, says: str, command: Command) -> None:
    text = Path("model.py").read_text()
    Path("regrouped.py").write_text(text.replace('["log", "kennel", "log"]', '["log", "log", "kennel"]'))
    failed = command(*shlex.split(line))
    assert (failed.code, failed.out) == (1, "") and says in failed.err


@pytest.mark.parametrize("more", [(), ("--tokens",)])
def test_a_missing_space_is_said_in_the_table(more: tuple[str, ...], command: Command) -> None:
    shown = command("attribute", "runs/news", *TASK, "--prompt", "the ship", "--completion", "sails on", *more)
    assert shown.code == 0 and "space" in shown.out


def test_words_are_listed_in_the_order_that_is_asked_for(command: Command) -> None:
    raises, lowers = (command(*ASK, "--tokens", "--by", by, "--json").values for by in ("raises", "lowers"))
    names = [[credit["source"] for credit in found["queries"][0]] for found in (raises, lowers)]
    assert names[0] == names[1][::-1]
    assert "sources can be ordered by" in command(*ASK, "--tokens", "--by", "size").err


def test_a_chat_model_is_not_asked_without_its_template_in_silence(command: Command, folder: Path) -> None:
    text = (folder / "model.py").read_text()
    (folder / "chat.py").write_text(text + "\nwords.chat_template = '{{ messages[0].content }}'\n")
    line = ("attribute", "runs/news", "--task", "chat.py:task", "--prompt", "a dog", "--completion", " barks")
    assert "the tokenizer has a chat template" in command(*line).out


def test_words_are_also_told_without_colours_and_with_the_standing_of_the_store(command: Command) -> None:
    shown = command(*ASK, "--tokens", "--out", "words.html")
    assert "Word by word: sails " in shown.out and "not validated" in Path("words.html").read_text()
