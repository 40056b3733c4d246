"""Causal language models of transformers, and their PEFT adapters: documents, completions, tasks and tokens."""

from imprint.language import recording
from imprint.language.aiming import aim
from imprint.language.callback import CheckpointCallback
from imprint.language.causal import LanguageTask, task
from imprint.language.chats import Conversations, Instructions
from imprint.language.data import Completions, Documents
from imprint.language.packed import Packed, PackedRun
from imprint.language.tokens import TokenAttribution, token_scores
from imprint.language.words import Credited, Opponent, Word, describe_credits
from imprint.language.words_page import render_page

__all__ = [
    "CheckpointCallback",
    "Completions",
    "Conversations",
    "Credited",
    "Documents",
    "Instructions",
    "LanguageTask",
    "Opponent",
    "Packed",
    "PackedRun",
    "TokenAttribution",
    "Word",
    "aim",
    "describe_credits",
    "recording",
    "render_page",
    "task",
    "token_scores",
]
