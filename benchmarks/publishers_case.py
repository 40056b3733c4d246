"""The fine-tune that benchmarks/publishers.py looks into: SmolLM2, 16 presidents, held-out passages, and questions."""

import copy
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from imprint import Sources
from imprint.benchmarking.settings import smollm2, sotu
from imprint.evaluation import Subsets
from imprint.language import Completions, Documents, LanguageTask, task
from imprint.recording.reading import Recording
from imprint.recording.writing import RunRecorder
from imprint.task import Parameters

QUESTIONS = (
    "What shall we do about the public debt?",
    "What do you say to the people about slavery and the Union?",
    "What is the state of our relations with the Indian tribes?",
    "Why must the tariff be revised?",
    "What have we built in the Panama Canal?",
    "What does the war demand of the nation?",
    "How will we create new jobs in America?",
    "What should the Congress do about health care?",
    "How do we deal with the great corporations and trusts?",
    "What is our policy toward the Soviet Union?",
    "How will we keep the peace of the world?",
    "What does the farmer need from the government?",
    "What is the condition of the Treasury?",
    "What did Mexico do to our citizens?",
    "How do we win the war on poverty?",
    "What have our Navy and Army accomplished?",
)


@dataclass(frozen=True)
class Settings:
    """How the model is fine-tuned, and what it is compared with.

    words: of each president. length: tokens of a passage that are used, so that little is padded. blocks: how many of
    the last blocks get an adapter, 0 for all; what lies before them is computed once for all replays. precision: of
    matrix products in training, as `torch.set_float32_matmul_precision` has it. sets, tuning_sets: for each number of
    presidents that are left out. seeds: other runs, for *expected*. path_batch: examples of a step of the path.
    """

    words: int = 5_000
    length: int = 104
    epochs: int = 1
    batch: int = 16
    lr: float = 5e-4
    rank: int = 8
    blocks: int = 0
    precision: str = "highest"
    drops: tuple[int, ...] = (2, 3, 4)
    sets: int = 11
    tuning_sets: int = 4
    seeds: int = 3
    expected_sets: int = 0
    path_steps: int = 40
    path_batch: int = 64


def _in_precision(train: Callable[..., Any]) -> Callable[..., Any]:
    """Have a training of a case compute matrix products as its settings say."""

    @functools.wraps(train)
    def trained(case: "Case", *given: Any) -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(case.settings.precision)
        try:
            return train(case, *given)
        finally:
            torch.set_float32_matmul_precision(before)

    return trained


@dataclass
class Case:
    """The model, the passages of every president, and what is asked.

    models: the folder of the expanded model. memory: what replays may use; by default a share of what is available.
    """

    folder: Path
    settings: Settings
    device: str
    small: bool
    models: Path
    memory: str | None = None

    @cached_property
    def addresses(self) -> sotu.Addresses:
        found = self._whole
        return sotu.Addresses(*(tuple(map(self._cut, passages)) for passages in (found.train, found.held_out)))

    @cached_property
    def _whole(self) -> sotu.Addresses:
        if self.small:
            return sotu.load(words=700, presidents=tuple(sotu.PRESIDENTS)[::3], held_out=1)
        return sotu.load(words=self.settings.words)

    def _cut(self, passage: sotu.Passage) -> sotu.Passage:
        tokens = self.tokenizer(passage.text)["input_ids"][: self.settings.length]
        return replace(passage, text=self.tokenizer.decode(tokens))

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        return _tiny_model(self._whole) if self.small else smollm2.load(self.models)

    @property
    def base(self) -> Any:
        """The model before the fine-tune."""
        return self._model[0]

    @property
    def tokenizer(self) -> Any:
        return self._model[1]

    @cached_property
    def documents(self) -> Documents:
        return Documents([passage.text for passage in self.addresses.train], self.tokenizer)

    @cached_property
    def sources(self) -> Sources:
        return self.documents.sources([passage.president for passage in self.addresses.train])

    @cached_property
    def own(self) -> Tensor:
        """The number of the president of each held-out passage."""
        return torch.tensor([self.sources.names.index(passage.president) for passage in self.addresses.held_out])

    @cached_property
    def passages(self) -> Completions:
        """Held-out passages: the rest of each after its beginning."""
        pairs = [passage.split() for passage in self.addresses.held_out]
        return Completions([prompt for prompt, _ in pairs], [rest for _, rest in pairs], self.tokenizer)

    @cached_property
    def asked(self) -> list[tuple[str, str]]:
        """Prompts and completions: the held-out passages, and the questions with the tuned model's own answers."""
        answers = json.loads((self.folder / "answers.json").read_text())
        return [*(passage.split() for passage in self.addresses.held_out), *map(tuple, answers)]

    @cached_property
    def queries(self) -> Completions:
        return Completions([prompt for prompt, _ in self.asked], [rest for _, rest in self.asked], self.tokenizer)

    def draw_sets(self) -> tuple[Subsets, Tensor]:
        """Draw the sets of presidents to leave out, and say which of them are for tuning, (sets,)."""
        s, chosen = self.settings, dict[tuple[int, ...], bool]()
        for count, seed, tuning in ((s.sets, 1, False), (s.tuning_sets, 101, True)):
            for drop in s.drops:
                drawn = Subsets.without_some(self.sources, count, drop=drop, seed=seed)
                for removed in filter(None, drawn.removed):
                    chosen.setdefault(removed, tuning)
        subsets = Subsets.without(self.sources, [(), *chosen], n=len(self.documents.documents))
        return subsets, torch.tensor(list(chosen.values()))

    # --- the fine-tune

    @_in_precision
    def tune(self, seed: int, folder: Path) -> RunRecorder:
        """Fine-tune the model from a seed, and record the run."""
        s, columns = self.settings, self.columns_on_device
        model = self.wrap(seed).train()
        loss = task(model, self.tokenizer).loss  # the one that replays compute, to the last bit
        optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=s.lr, weight_decay=0.0)
        n = len(self.documents.documents)
        steps = s.epochs * -(-n // s.batch)
        run = RunRecorder(folder, model, optimiser, data=self.documents.columns, seed=seed, every=max(1, steps // 4))
        rates = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _schedule(step, steps))
        for indices in run.batches(n, s.batch, epochs=s.epochs):
            with run.step(indices) as step:
                optimiser.zero_grad()
                step.backward(loss(model, {name: t[indices] for name, t in columns.items()}).mean())
                optimiser.step()
            rates.step()
        run.finish()
        return run

    @cached_property
    def columns_on_device(self) -> dict[str, Tensor]:
        return {name: t.to(self.device) for name, t in self.documents.columns.items()}

    def wrap(self, seed: int) -> Any:
        """Return a copy of the base model with a fresh adapter."""
        torch.manual_seed(seed)
        layers, last = self.base.config.num_hidden_layers, self.settings.blocks
        config = LoraConfig(
            r=self.settings.rank,
            lora_alpha=2 * self.settings.rank,
            target_modules=["q_proj", "v_proj"],
            layers_to_transform=list(range(layers - last, layers)) if last else None,
        )
        return get_peft_model(copy.deepcopy(self.base), config).to(self.device)

    def recorded(self) -> tuple[LanguageTask, Recording]:
        """Return the task of the tuned model, and the recording of how it was tuned."""
        if "found" not in self.__dict__:
            place = self.folder / "run"
            if not place.exists():
                self.tune(0, place)
            run, model = Recording(place), self.wrap(0)
            model.load_state_dict(run.state(len(run.steps)), strict=False)
            self.__dict__["found"] = task(model.eval(), self.tokenizer), run
        return self.__dict__["found"]  # type: ignore[no-any-return]

    @_in_precision
    def train_again(self, weights: Mapping[int, float]) -> Parameters:
        """Make the recorded run again by plain training, with some examples at another weight; return its end."""
        tuned, run = self.recorded()
        columns, model = self.columns_on_device, self.wrap(0).train()
        model.load_state_dict(run.state(0), strict=False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(trained, lr=self.settings.lr, weight_decay=0.0)
        of_each = torch.ones(len(self.documents.documents), device=self.device)
        for index, weight in weights.items():
            of_each[index] = weight
        for step in run.steps:
            indices = torch.tensor(step.batches[0].examples)
            optimiser.param_groups[0]["lr"] = step.groups[0]["lr"]
            optimiser.zero_grad()
            losses = tuned.loss(model, {name: t[indices] for name, t in columns.items()})
            (losses * of_each[indices.to(self.device)]).mean().backward()
            optimiser.step()
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def measure(self, tuned: LanguageTask, state: Parameters) -> Tensor:
        """Measure the queries at some parameters, (queries,)."""
        functional, theta = tuned.at(tuned.complete(state))
        columns, found = self.queries.columns, []
        with tuned.evaluating():
            for begin in range(0, len(self.queries), 32):
                batch = {name: t[begin : begin + 32].to(self.device) for name, t in columns.items()}
                found.append(functional.measures(theta, batch, len(batch["input_ids"])))
        return torch.cat(found).double().cpu()

    # --- what the models know

    def measure_knowledge(self, tuned: Any) -> dict[str, dict[str, float]]:
        """Measure the loss per token before and after the fine-tune, on held-out and learnt passages, by president."""
        held_out, learnt = self.addresses.held_out, self.addresses.train
        base = self.base.to(self.device)
        found = {}
        for name, model in (("base", base), ("tuned", tuned)):
            found[f"{name}, held out"] = self._nats(model, self.passages.columns, held_out)
            found[f"{name}, learnt"] = self._nats(model, self.documents.columns, learnt)
        return found

    @torch.no_grad()
    def _nats(self, model: Any, columns: Mapping[str, Tensor], passages: tuple[sotu.Passage, ...]) -> dict[str, float]:
        pairs = []
        for begin in range(0, len(passages), 32):
            batch = {name: t[begin : begin + 32].to(self.device) for name, t in columns.items()}
            counted = {**batch, "weights": (batch["weights"] > 0).float()}
            losses = self.recorded()[0].loss(model, counted)
            pairs.append(torch.stack([losses, counted["weights"][:, 1:].sum(1)], 1).cpu().double())
        sums: dict[str, Tensor] = {}
        for passage, pair in zip(passages, torch.cat(pairs), strict=True):
            sums[passage.president] = sums.get(passage.president, torch.zeros(2, dtype=torch.float64)) + pair
        return {president: float(pair[0] / pair[1]) for president, pair in sums.items()}

    def recite(self, tokens: int = 16) -> float:
        """Return the share of held-out passages that the base model continues word for word, by so many tokens."""
        pairs = [passage.split() for passage in self.addresses.held_out]
        said = self._continue(self.base.to(self.device), [prompt for prompt, _ in pairs], tokens)
        rest = [self.tokenizer(rest)["input_ids"][:tokens] for _, rest in pairs]
        return float(sum(one[: len(two)] == two for one, two in zip(said, rest, strict=True)) / len(rest))

    def answer(self, tuned: Any, tokens: int = 48) -> list[tuple[str, str]]:
        """Have the tuned model answer the questions, and keep its answers in the folder: they are queries too."""
        place = self.folder / "answers.json"
        if not place.exists():
            prompts = [f"{question} Fellow citizens," for question in QUESTIONS]
            answers = self.reply(tuned, prompts, tokens)
            kept = [(prompt, " " + text) for prompt, text in zip(prompts, answers, strict=True) if text]
            place.write_text(json.dumps(kept, indent=1))
        return json.loads(place.read_text())  # type: ignore[no-any-return]

    def reply(self, model: Any, prompts: list[str], tokens: int = 48) -> list[str]:
        """Return the text that a model continues each prompt with."""
        said = self._continue(model, prompts, tokens, repetition_penalty=1.2)
        return [self.tokenizer.decode(each, skip_special_tokens=True).strip() for each in said]

    @torch.no_grad()
    def _continue(self, model: Any, prompts: list[str], tokens: int, **options: Any) -> list[list[int]]:
        """Return the tokens that a model continues each prompt with, the likeliest at every step."""
        rows = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.device)
        known = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": tokens, "do_sample": False}
        said = model.generate(**known, pad_token_id=0, **options)
        return [[token for token in row[longest:].tolist() if token] for row in said]


def _schedule(step: int, steps: int, warming: float = 0.1) -> float:
    """Return the learning rate of a step relative to the highest: linear warm-up, then linear decay."""
    warm = max(1, round(warming * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def _tiny_model(addresses: sotu.Addresses) -> tuple[Any, Any]:
    """Return a random Llama of two layers and a tokenizer of words, to see that everything runs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = sorted({word for passage in addresses.train for word in passage.text.split()})[:500]
    vocabulary = {word: index for index, word in enumerate(["<s>", "<unk>", *words])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="<s>", unk_token="<unk>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), attn_implementation="eager", **sizes)
    return LlamaForCausalLM(config).eval(), tokenizer
