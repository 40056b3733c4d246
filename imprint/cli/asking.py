"""Turns texts on the command line into queries of a language model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from imprint.cli.loading import Objects
from imprint.errors import ConfigurationError

if TYPE_CHECKING:
    from imprint.language import Completions

PromptTexts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="The text before each --completion, in the same order. Default: none."),
]
CompletionTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--completion",
        help="A text to attribute, instead of the queries, for a language model; usually it begins with a space. "
        "Repeat the option for several.",
    ),
]


_CHAT = (
    "the tokenizer has a chat template, and texts are taken as they are: a model that was trained on chats wants the "
    "marks of its template around them, as language.Completions.from_messages puts them."
)


def check_texts(queries: str | None, prompts: list[str] | None, completions: list[str] | None) -> None:
    """Refuse texts that do not belong together."""
    if prompts and not completions:
        raise ConfigurationError("--prompt needs a --completion to attribute.")
    if completions and queries:
        raise ConfigurationError("give --queries or --completion, not both.")
    if completions and prompts and len(prompts) != len(completions):
        raise ConfigurationError(
            f"every --completion needs its --prompt, in the same order: there are {len(prompts)} and "
            f'{len(completions)}. (--prompt "" is one without text.)'
        )


def ask(objects: Objects, prompts: list[str] | None, completions: list[str]) -> "Completions":
    """Make queries from texts, with the tokenizer of the task or of its file."""
    from imprint.language import Completions

    tokenizer = find_tokenizer(objects)
    made = Completions(prompts or [""] * len(completions), completions, tokenizer)
    if getattr(tokenizer, "chat_template", None):
        made.warnings = (*made.warnings, _CHAT)
    return made


def _require_language(objects: Objects) -> None:
    from imprint.language import LanguageTask

    if not isinstance(objects.task, LanguageTask):
        raise ConfigurationError(
            f"--completion is for language models, as imprint.language.task makes their tasks; {objects.module} has a "
            f"{type(objects.task).__name__}. Give its queries with --queries."
        )


def find_tokenizer(objects: Objects) -> Any:
    """Return the tokenizer of a language task, or the one in its file."""
    _require_language(objects)
    found = getattr(objects.task, "tokenizer", None) or objects.find_optional("tokenizer")
    if found is None:
        raise ConfigurationError(
            f"the tokenizer is unknown: give it to language.task(model, tokenizer), or define `tokenizer` in "
            f"{objects.module}."
        )
    return found
