"""What a reader of benchmarks/publishers.py wants to see: who moved which answer, word by word, and what a model
without that president says instead.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from publishers_case import Case
from publishers_results import Results
from torch import Tensor

from imprint import Attribution, Store, validate
from imprint.evaluation import Truth
from imprint.language import LanguageTask, token_scores
from imprint.language.tokens import TokenAttribution
from imprint.task import Parameters
from imprint.tensors.vectors import root_mean_square, root_mean_squares

WORDS = 8  # that are listed of an answer


def tell(case: Case, results: Results) -> None:
    """Attribute every answer word by word, and have the model without its most helpful president answer too."""
    tuned, _ = case.recorded()
    store = Store(case.folder / "store")
    told = []
    with results.timed("word by word"):
        for prompt, completion in json.loads((case.folder / "answers.json").read_text()):
            words = token_scores(tuned, store, prompt, completion, case.tokenizer, memory=case.memory)
            told.append(_describe(words, prompt, completion))
    with results.timed("answers of models without a president"):
        for president in sorted({each["most helpful"] for each in told}):
            asked = [each for each in told if each["most helpful"] == president]
            with _without(tuned, store, case.sources.names.index(president)):
                said = case.reply(tuned.model, [each["prompt"] for each in asked])
            for each, text in zip(asked, said, strict=True):
                each["without"] = text
    results.keep(story=told)


def check_removals(case: Case, results: Results) -> None:
    """Make the run again by plain training without three presidents, and without a set of them; compare with replays.

    The three are those with the largest, a middling and the smallest effect. The set is the first of the largest ones
    that replays were made without, if there are any.
    """
    tuned, _ = case.recorded()
    exact = -results.scores["replayed removals"] / len(case.documents.documents)
    by_size = root_mean_squares(exact).argsort(descending=True).tolist()
    some = (by_size[0], by_size[len(by_size) // 2], by_size[-1])
    chosen: dict[tuple[int, ...], Tensor] = {(index,): exact[:, index] for index in some}
    if (case.folder / "sets" / "truth.json").is_file():
        truth = Truth.load(case.folder / "sets")
        sets = [removed for removed in truth.subsets.removed if removed]
        largest = max(range(len(sets)), key=lambda index: len(sets[index]))
        chosen[sets[largest]] = truth.effects[0, :, largest].double()
    found = {}
    with results.timed(f"plain training without {len(chosen)} sets"):
        plain = case.measure(tuned, case.train_again({}))
        for sources, replayed in chosen.items():
            members = [index for source in sources for index in case.sources.members[source].tolist()]
            change = case.measure(tuned, case.train_again(dict.fromkeys(members, 0.0))) - plain
            off = root_mean_square(change - replayed) / root_mean_square(change)
            found[" + ".join(case.sources.names[source] for source in sources)] = float(off)
    results.keep(retrained=found)


def validate_store(case: Case, results: Results) -> None:
    """Have the library itself remove sets of presidents, and keep its verdict."""
    tuned, run = case.recorded()
    known: dict[str, Any] = {"task": tuned, "data": case.documents.columns, "sources": case.sources, "run": run}
    with results.timed("validation"):
        verdict = validate(Store(case.folder / "store"), case.passages, **known, memory=case.memory)
    results.keep(validation=str(verdict))
    print(verdict)


def _describe(words: TokenAttribution, prompt: str, completion: str) -> dict[str, Any]:
    """Return the effects on an answer, and what its most helpful president contributes to each word."""
    whole, credited = words.completion, words.credited(WORDS)
    return {
        "prompt": prompt,
        "answer": completion,
        "most helpful": words.labels.source_names[words.labels.source_ids.index(words.most_helpful)],
        "effects": dict(zip(words.labels.source_names, whole.removal_effect[0].tolist(), strict=True)),
        "noise": _noise(whole),
        "words": [(word.text, word.contribution, word.distinguishable) for word in credited],
        "every word": [(word.text, word.contribution) for word in words.rate_words(words.most_helpful)],
    }


def _noise(result: Attribution) -> float | None:
    return None if result.noise is None else float(result.noise[0])


@contextmanager
def _without(tuned: LanguageTask, store: Store, index: int) -> Iterator[None]:
    """Give the model the parameters of the run without a president for a while."""
    removal = store.imprints(0, index, index + 1, tuned.device)
    before: Parameters = {name: p.detach().clone() for name, p in tuned.model.named_parameters() if name in removal}
    with torch.no_grad():
        for name, tensor in before.items():
            tuned.model.get_parameter(name).copy_(tensor - removal[name][0] / store.n)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in before.items():
                tuned.model.get_parameter(name).copy_(tensor)
