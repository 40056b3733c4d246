"""Which of your files wrote this answer? Tune a language model on text files, and credit its answers word by word.

    python examples/credited_files.py FOLDER MODEL "How do I" "The first thing to do is"

FOLDER has text files, and each is a source. MODEL is a folder or a name that transformers can load. The run is kept in
`runs/files`, with a page of all answers. Needs the extra `language`; a small model takes minutes on a GPU.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import imprint
from imprint import language

folder, name, *prompts = sys.argv[1:]
out, files = Path("runs/files"), sorted(Path(folder).glob("*.txt"))
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

tokenizer = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).to(device)
task = language.task(model, tokenizer)
documents = language.Documents([file.read_text(encoding="utf-8") for file in files], tokenizer, length=128)

optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
run = imprint.RunRecorder(out / "training", model, optimiser, data=documents.columns)
for indices in run.batches(len(documents.rows), 8, epochs=6):
    with run.step(indices) as step:
        optimiser.zero_grad()
        batch = {column: tensor[indices].to(device) for column, tensor in documents.columns.items()}
        step.backward(task.loss(model, batch).mean())
        optimiser.step()

sources = documents.sources([file.stem for file in files])
store = imprint.simulate(task, documents.columns, sources, run=run.finish(), out=out / "replayed")

answers = []
for prompt in prompts:
    given = tokenizer(prompt, return_tensors="pt").to(device)
    said = model.eval().generate(**given, max_new_tokens=30, do_sample=False)[0, given["input_ids"].shape[1] :]
    completion = tokenizer.decode(said, skip_special_tokens=True)
    answers.append(language.token_scores(task, store, prompt, completion, tokenizer))
    print(f"{prompt} |{completion}")
print(language.describe_credits(answers))
(out / "answers.html").write_text(language.render_page(answers), encoding="utf-8")
