"""From a trained model to statements that publishers can check: train, simulate, validate, sign, credit, close, pay.

    python examples/credit.py        # writes credit-demo/

Ten publishers supply examples of three classes; two of them do not check their facts. Forty answers are credited.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import imprint
from imprint.credit import Ledger, Policy, Tariff, encode_queries
from imprint.credit.disputes import dispute
from imprint.credit.heads import read_heads
from imprint.credit.periods import close_period
from imprint.credit.proofs import check_statement
from imprint.credit.statements import write_statements
from imprint.credit.verifying import verify
from imprint.keys import load_public_key, make_keys
from imprint.store.signing import sign_store

OUT = Path("credit-demo")
NAMES = ["Aspen", "Birch", "Cedar", "Elder", "Hazel", "Linden", "Maple", "Oak", "Rowan", "Willow"]


def make_data() -> tuple[tuple[Tensor, Tensor], list[str], tuple[Tensor, Tensor]]:
    """Make the training data: each publisher knows one class best, Elder and Rowan report at random."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.2 * torch.randn(3, 8, generator=generator)
    publishers, labels = list[str](), list[Tensor]()
    for place, name in enumerate(NAMES):
        chances = torch.tensor([0.2, 0.2, 0.2])
        chances[place % 3] = 0.6
        labels.append(torch.multinomial(chances, 30 + 10 * (place % 4), replacement=True, generator=generator))
        publishers += [name] * len(labels[-1])
    y = torch.cat(labels)
    x = centres[y] + torch.randn(len(y), 8, generator=generator)
    for place, name in enumerate(publishers):
        if name in ("Elder", "Rowan"):
            y[place] = torch.randint(0, 3, (), generator=generator)
    asked = torch.randint(0, 3, (40,), generator=generator)
    return (x, y), publishers, (centres[asked] + torch.randn(40, 8, generator=generator), asked)


def record(seed: int, folder: str | Path) -> imprint.Recording:
    """Train once, and record the run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = imprint.RunRecorder(folder, model, optimiser, data=data, seed=seed)
    for indices in run.batches(len(data[0]), 32, epochs=8):
        with run.step(indices) as step:
            optimiser.zero_grad()
            step.backward(nn.functional.cross_entropy(model(data[0][indices]), data[1][indices]))
            optimiser.step()
    return run.finish()


data, publishers, queries = make_data()

# 1. Imprints from the first checkpoints of four runs, compared with sources that are really removed from other runs.
runs = [record(seed, OUT / "runs" / str(seed)) for seed in range(4)]
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
model.load_state_dict(runs[0].state(len(runs[0].steps)))  # the model that answers
task, sources = imprint.Task.classifier(model), imprint.Sources.by_label(publishers)
checkpoints = [run.paths[:2] for run in runs]
store = imprint.simulate(task, data, sources, imprint.Plan(steps=40), checkpoints=checkpoints, out=OUT / "store")
print(imprint.validate(store, queries, record=record).validation)

# 2. Two keys: one signs the store, so that nobody exchanges two publishers, the other one the ledger.
for name in ("store.key", "credit.key"):
    make_keys(OUT / name)
sign_store(imprint.Store(store.path), OUT / "store.key")
store = imprint.Store(store.path, signed_by=OUT / "store.key.pub")

# 3. Every answer pays 0.25 EUR, and the policy says to whom.
policy = Policy("house rules", question="expected")
ledger = Ledger.create(OUT / "credit.db", Tariff("EUR", per_query=250_000), signed_by=OUT / "store.key.pub")
result = imprint.attribute(task, store, queries)
receipt = ledger.credit(result, policy, payloads=encode_queries(queries), key="answers-1")
again = ledger.credit(result, policy, payloads=encode_queries(queries), key="answers-1")
print(f"{len(receipt.entries)} answers credited; the same request again credits nothing: {again.repeated}")

# 4. Close the period, publish a signed head, write the statements.
close_period(ledger, "2026-11")
ledger.sign_head(OUT / "credit.key", publish=OUT / "heads.jsonl")
terms = {"Payer": "Example Ltd", "Questions": "publishers@example.com, within 60 days"}
pages = write_statements(ledger, "2026-11", OUT / "statements", terms=terms)
print(f"{len(pages)} statements in {OUT / 'statements'}")

# 5. What anybody can check: a publisher its statement, an auditor the ledger, both sides a doubtful answer.
key = load_public_key(OUT / "credit.key.pub")
print(check_statement(OUT / "statements" / "Oak.jsonl", key))
print(verify(ledger, key=key, heads=read_heads(OUT / "heads.jsonl")))
print(dispute(ledger, receipt.sequences[0], task, store))
