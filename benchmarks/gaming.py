"""By how much a source can move its own share: six ways to be paid more, under each rule of a policy.

    OMP_NUM_THREADS=1 python benchmarks/gaming.py digits
    OMP_NUM_THREADS=1 python benchmarks/gaming.py shakespeare

Twelve sources, of which one attacks: the contributors of the demo's digits, or pairs of segments of tiny Shakespeare,
with a small GPT on characters. Models are trained with four seeds, every run is replayed without each source, and the
mean of the replays answers "expected", with its standard error over seeds. Before anything is divided, three further
seeds validate these effects, as `imprint.validate` would: a policy that requires validated ranks pays nobody otherwise,
and the verdict is printed. Then the attacker changes its data, everything is trained again with the same seeds, and the
same queries are divided again; its share is that of all sources it owns.

Attacks that add examples add as many as the attacker has. "honest work" adds examples that nobody had, for comparison.
Wash queries are a fifth of all queries, asked by the attacker about its own training examples. Intervals are over
repeats: other splits of the data, other attackers, other seeds.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from imprint import Attribution, Sources, attribute, combine, simulate
from imprint.batches import map_tensors
from imprint.benchmarking.settings import characters, digits
from imprint.benchmarking.settings.shakespeare import make_columns, read_speeches
from imprint.credit import PARTS, Policy
from imprint.credit.drafting import draft_entries
from imprint.errors import ReliabilityWarning
from imprint.evaluation import Together, Training
from imprint.statistics import Array, Estimate, mean_estimate
from imprint.task import Batch
from imprint.validation.verdict import Verdict, judge

SEEDS, JUDGES = 4, 3
"""Runs that effects are averaged over, and further runs that validate them."""
POLICIES = (
    Policy("default", "expected"),
    Policy("positive part", "expected", rule="positive_part"),
    Policy("fixed plus", "expected", rule="fixed_plus", fixed=0.2),
)
PARTS_OF_ONE = 4  # sources that the attacker splits itself into
WASHED = 0.2  # of all queries
ME = "attacker"


@dataclass(frozen=True)
class Market:
    """What is trained, from whom, and what is asked.

    owners: the source of each training example; sources of the attacker begin with its name.
    fresh: examples of the attacker that nobody has seen.
    near, disguise: change examples a little, and so far that no search for copies finds them.
    """

    together: Callable[[Batch], Together]
    train: Batch
    owners: tuple[str, ...]
    queries: Batch
    fresh: Batch
    near: Callable[[Batch, torch.Generator], Batch]
    disguise: Callable[[Batch, torch.Generator], Batch]

    def find(self, owner: str) -> list[int]:
        """Return the examples of a source."""
        return [place for place, name in enumerate(self.owners) if name == owner]

    def take(self, owner: str, count: int) -> Batch:
        """Return so many examples of a source, from the beginning again if it has fewer."""
        found = self.find(owner)
        return pick(self.train, [found[place % len(found)] for place in range(count)])

    def add(self, examples: Batch) -> "Market":
        """Give the attacker more examples."""
        more = count_rows(examples)
        return replace(self, train=join(self.train, examples), owners=(*self.owners, *(ME,) * more))


def pick(batch: Batch, places: Sequence[int] | Tensor) -> Batch:
    chosen = torch.as_tensor(places)
    return map_tensors(lambda column: column[chosen], batch)


def join(one: Any, other: Any) -> Batch:
    if isinstance(one, dict):
        return {name: torch.cat([one[name], other[name]]) for name in one}
    return tuple(torch.cat(pair) for pair in zip(one, other, strict=True))


def count_rows(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


# --- the attacks


def split_itself(market: Market, victim: str, draw: torch.Generator) -> Market:
    mine = iter(torch.randperm(len(market.find(ME)), generator=draw).tolist())
    return replace(
        market, owners=tuple(f"{ME} {next(mine) % PARTS_OF_ONE}" if name == ME else name for name in market.owners)
    )


def work_honestly(market: Market, victim: str, draw: torch.Generator) -> Market:
    return market.add(pick(market.fresh, range(len(market.find(ME)))))


def copy_another(market: Market, victim: str, draw: torch.Generator) -> Market:
    return market.add(market.take(victim, len(market.find(ME))))


def pad_with_copies(market: Market, victim: str, draw: torch.Generator) -> Market:
    return market.add(market.take(ME, len(market.find(ME))))


def copy_queries(market: Market, victim: str, draw: torch.Generator) -> Market:
    count = min(len(market.find(ME)), count_rows(market.queries))
    return market.add(market.near(pick(market.queries, range(count)), draw))


def paraphrase(market: Market, victim: str, draw: torch.Generator) -> Market:
    return market.add(market.disguise(market.take(victim, len(market.find(ME))), draw))


ATTACKS: dict[str, Callable[[Market, str, torch.Generator], Market]] = {
    "splits itself into four": split_itself,
    "copies another's content": copy_another,
    "paraphrases another's content": paraphrase,
    "pads itself with copies of its own": pad_with_copies,
    "adds near-copies of the queries": copy_queries,
    "honest work, as much": work_honestly,
}
WASH = "sends wash queries"


# --- what a market pays


def replay(market: Market, asked: Sequence[Batch], seeds: Sequence[int]) -> list[list[Attribution]]:
    """Train with each seed and replay without each source; return the effects on each list of queries, per seed."""
    how, sources = market.together(market.train), Sources.by_label(list(market.owners))
    found = list[list[Attribution]]()
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="imprint-gaming-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", ReliabilityWarning)  # a chaotic seed is what the others are for
            run = how.record(seed, Path(folder) / "run")
            model = how.build()
            model.load_state_dict(run.state(len(run.steps)))
            task = how.task_of(model)
            store = simulate(task, market.train, sources, run=run, progress=False)
            found.append([attribute(task, store, queries, progress=False) for queries in asked])
    return found


def validate(effects: Attribution, judges: Sequence[Attribution]) -> Verdict:
    """Compare mean effects with the same removals in runs of other seeds."""
    actual = np.stack([each.removal_effect.double().numpy() for each in judges])
    removals = [[place] for place in range(actual.shape[2])]
    sizes = np.array(effects.labels.source_sizes, dtype=np.float64)
    return judge(effects.removal_effect.double().numpy(), removals, actual, sizes, "expected")


def divide(effects: Attribution, verdict: Verdict, policy: Policy) -> dict[str, Array]:
    """Return the share that each source has of each query, as entries of a ledger would have it."""
    validated = replace(effects, labels=replace(effects.labels, validation=verdict))
    count = len(effects)
    drafts = draft_entries(validated, policy, [None] * count, [f"q{place}" for place in range(count)], [None] * count)
    if {draft.about["rule"] for draft in drafts} != {policy.rule}:
        raise SystemExit(f"nobody is paid: {drafts[0].about['reason']}")
    sources = [row["source"] for row in drafts[0].rows]
    shares = np.array([[row["share"] / PARTS for row in draft.rows] for draft in drafts])
    return dict(zip(sources, shares.T, strict=True))


def own_share(shares: dict[str, Array]) -> Array:
    """Return the share of all sources that the attacker owns, of each query."""
    return np.asarray(np.sum([share for source, share in shares.items() if source.startswith(ME)], axis=0))


def play(market: Market, repeat: int) -> dict[str, Any]:
    """Measure the share of one attacker before and after each attack, under each policy."""
    draw = torch.Generator().manual_seed(repeat)
    seeds = [1_000 * (repeat + 1) + place for place in range(SEEDS + JUDGES)]
    washed = round(count_rows(market.queries) * WASHED / (1 - WASHED))
    replays = replay(market, [market.queries, market.take(ME, washed)], seeds)
    before, wash = (combine([each[place] for each in replays[:SEEDS]]) for place in (0, 1))
    verdict = validate(before, [each[0] for each in replays[SEEDS:]])
    print(f"repeat {repeat}: {verdict}", flush=True)
    shares = {policy.rule: divide(before, verdict, policy) for policy in POLICIES}
    rest = {source: share.mean() for source, share in shares["positive_part"].items() if source != ME}
    victim = max(rest, key=lambda source: float(rest[source]))
    found: dict[str, Any] = {
        "verdict": str(verdict),
        "sizes": {name: len(market.find(name)) for name in (ME, victim)},
        "before": {rule: float(own_share(each).mean()) for rule, each in shares.items()},
        "unattributed": {
            rule: 1 - float(sum(share.mean() for share in each.values())) for rule, each in shares.items()
        },
        "after": {WASH: {}},
        "returned": {},
    }
    for policy in POLICIES:
        paid, returned = own_share(shares[policy.rule]), own_share(divide(wash, verdict, policy))
        found["after"][WASH][policy.rule] = float(np.concatenate([paid, returned]).mean())
        found["returned"][policy.rule] = float(returned.mean())
    for name, attack in ATTACKS.items():
        changed = attack(market, victim, draw)
        after = combine([each[0] for each in replay(changed, [market.queries], seeds[:SEEDS])])
        found["after"][name] = {
            policy.rule: float(own_share(divide(after, verdict, policy)).mean()) for policy in POLICIES
        }
    return found


# --- the two settings


def load_digits(repeat: int) -> Market:
    """Load a split of the digits; the attacker is an honest contributor of medium size, 120 queries are paid."""
    split = digits.load(repeat)
    sizes = sorted((int((split.owners == place).sum()), place) for place in range(len(digits.CONTRIBUTORS)))
    honest = [place for _, place in sizes if place != split.mislabeller]
    attacker = honest[len(honest) // 2]
    names = tuple(ME if place == attacker else digits.CONTRIBUTORS[place] for place in split.owners.tolist())
    training = replace(digits.TRAINING, epochs=10)
    return Market(
        together=lambda train: Together(digits.model, digits.task, train, training),
        train=split.train,
        owners=names,
        queries=pick(split.queries, range(120)),
        fresh=pick(split.queries, range(120, len(split.queries[1]))),
        near=lambda batch, draw: (_blur(batch[0], 0.1, draw), batch[1]),
        disguise=lambda batch, draw: (_blur(_turn(batch[0], draw), 0.3, draw), batch[1]),
    )


def _blur(pictures: Tensor, noise: float, draw: torch.Generator) -> Tensor:
    return pictures + noise * torch.randn(pictures.shape, generator=draw)


def _turn(pictures: Tensor, draw: torch.Generator) -> Tensor:
    """Rotate each picture by up to 15 degrees, and shift it by up to a pixel each way."""
    angles = (torch.rand(len(pictures), generator=draw) - 0.5) * np.pi / 6
    shifts = (torch.rand(len(pictures), 2, generator=draw) - 0.5) * 0.5
    first = torch.stack([angles.cos(), -angles.sin(), shifts[:, 0]], 1)
    second = torch.stack([angles.sin(), angles.cos(), shifts[:, 1]], 1)
    grid = functional.affine_grid(torch.stack([first, second], 1), [len(pictures), 1, 8, 8], align_corners=False)
    squares = pictures.view(-1, 1, 8, 8)
    turned = functional.grid_sample(squares, grid, padding_mode="border", align_corners=False)
    return turned.flatten(1)


LENGTH = 64  # characters of a window, so that this takes minutes
WINDOWS = 8  # of each segment
TRAINING = Training(
    epochs=4, lr=3e-3, batch_size=32, optimiser="adam", betas=(0.9, 0.99), warmup=10, schedule="cosine", drop_last=True
)


def load_shakespeare(repeat: int) -> Market:
    """Load pairs of segments as twelve sources; another pair attacks in each repeat, 120 passages are paid."""
    text = characters.load(windows=25, where=(repeat + 0.5) / 8)
    ids, owners = text.train["input_ids"][:, :LENGTH], text.owners
    attacker = (5 * repeat + 2) % 12
    order = torch.cat([torch.arange(int((owners == segment).sum())) for segment in owners.unique()])
    kept, fresh = order < WINDOWS, (order >= WINDOWS) & (owners // 2 == attacker)
    names = tuple(ME if place == attacker else f"pair {place:02}" for place in (owners[kept] // 2).tolist())
    space = sorted(set(read_speeches())).index(" ")  # as `characters.load` numbers them
    return Market(
        together=lambda train: characters.together(train, TRAINING, "cpu", characters.Shape(1, 32, 2)),
        train=make_columns(ids[kept]),
        owners=names,
        queries=make_columns(text.queries["input_ids"][:, :LENGTH]),
        fresh=make_columns(ids[fresh]),
        near=lambda batch, draw: make_columns(_misspell(batch["input_ids"], 0.03, draw)),
        disguise=lambda batch, draw: make_columns(_shuffle_words(batch["input_ids"], space, draw)),
    )


def _misspell(ids: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Replace some characters by others of the same texts."""
    chosen = torch.rand(ids.shape, generator=draw) < share
    others = ids.flatten()[torch.randint(ids.numel(), ids.shape, generator=draw)]
    return torch.where(chosen, others, ids)


def _shuffle_words(ids: Tensor, space: int, draw: torch.Generator) -> Tensor:
    """Change the order of words within every four, and misspell a few."""
    rows = []
    for row in ids.tolist():
        words, word = list[list[int]](), list[int]()
        for each in row:
            word.append(each)
            if each == space:
                words.append(word)
                word = []
        words.append(word)
        mixed = list[int]()
        for start in range(0, len(words), 4):
            four = words[start : start + 4]
            for place in torch.randperm(len(four), generator=draw).tolist():
                mixed += four[place]
        rows.append(mixed)
    return _misspell(torch.tensor(rows), 0.03, draw)


# --- the table


def show(setting: str, repeats: list[dict[str, Any]]) -> None:
    """Print the share of the attacker before, and by how many points each attack moves it."""
    rules = [policy.rule for policy in POLICIES]
    print(f"\n{setting}: {len(repeats)} repeats, in points of a hundred, with 95% intervals")
    print(f"| what the attacker does | {' | '.join(f'`{rule}`' for rule in rules)} |\n|---|{'---:|' * len(rules)}")

    def row(name: str, find: Callable[[dict[str, Any], str], float], sign: bool) -> None:
        cells = [format_estimate(mean_estimate([100 * find(each, rule) for each in repeats]), sign) for rule in rules]
        print(f"| {name} | {' | '.join(cells)} |")

    row("nothing: its share is", lambda each, rule: each["before"][rule], False)
    for name in (*ATTACKS, WASH):

        def find_gain(each: dict[str, Any], rule: str, name: str = name) -> float:
            return float(each["after"][name][rule] - each["before"][rule])

        row(name, find_gain, True)
    row("of what it pays for wash queries, it gets back", lambda each, rule: each["returned"][rule], False)
    row("unattributed before", lambda each, rule: each["unattributed"][rule], False)


def format_estimate(found: Estimate, sign: bool) -> str:
    form = "+.1f" if sign else ".1f"
    value, low, high = (round(each, 1) + 0.0 for each in (found.value, found.low, found.high))  # no minus before 0.0
    return f"{value:{form}}" if np.isnan(low) else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=("digits", "shakespeare"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    options = parser.parse_args()
    load = load_digits if options.setting == "digits" else load_shakespeare
    found = list[dict[str, Any]]()
    for repeat in range(options.repeats):
        found.append(play(load(repeat), repeat))
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))
    show(options.setting, found)


if __name__ == "__main__":
    main()
