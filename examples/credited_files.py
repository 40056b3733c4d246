"""Which of your files wrote this answer? Tune a language model on text files, and credit its answers word by word.

    python examples/credited_files.py FOLDER MODEL "How do I" "The first thing to do is"

FOLDER has text files (*.txt), and each is a source. MODEL is a folder or a name that transformers can load. The run is
kept in `runs/files`: other prompts are answered without training again. A page of all answers is written there, too.
Needs the extra `language`; a small model takes minutes on a GPU.
"""

import sys
from itertools import takewhile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import imprint
from imprint import language

if len(sys.argv) < 4:
    sys.exit(__doc__)
folder, name, *prompts = sys.argv[1:]
out, files = Path("runs/files"), sorted(Path(folder).glob("*.txt"))
if not files:
    sys.exit(f"{folder} has no text files (*.txt).")
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

tokenizer = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).to(device)
task = language.task(model, tokenizer)
documents = language.Documents([file.read_text(encoding="utf-8") for file in files], tokenizer, length=128)

if not (out / "training").exists():
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run = imprint.RunRecorder(out / "training", model, optimiser, data=documents.columns)
    for indices in run.batches(len(documents.rows), 8, epochs=6):
        with run.step(indices) as step:
            optimiser.zero_grad()
            batch = {column: tensor[indices].to(device) for column, tensor in documents.columns.items()}
            step.backward(task.loss(model, batch).mean())
            optimiser.step()
    run.finish()
recording = imprint.Recording(out / "training")
model.load_state_dict(recording.state(len(recording.steps)), strict=False)  # strict: the base is not recorded

sources = documents.sources([file.stem for file in files])
store = imprint.simulate(task, documents.columns, sources, run=recording, out=out / "replayed")

answers = []
for prompt in prompts:
    given = tokenizer(prompt, return_tensors="pt").to(device)
    said = model.eval().generate(**given, max_new_tokens=30, do_sample=False)[0, given["input_ids"].shape[1] :]
    said = list(takewhile(lambda token: token not in tokenizer.all_special_ids, said.tolist()))
    if said:  # token ids, not text: its tokens may be others
        answers.append(language.token_scores(task, store, given["input_ids"][0], said, tokenizer))
    print(f"{prompt} |{tokenizer.decode(said)}")
if not answers:
    sys.exit("The model says nothing after these prompts.")
print(language.describe_credits(answers))
(out / "answers.html").write_text(language.render_page(answers), encoding="utf-8")
print(f"{out / 'answers.html'} shows every word.")
