"""A small store whose sources, classes and owners have names that try to be markup."""

from pathlib import Path

import torch
from torch import nn

import imprint
from imprint.about import About
from imprint.serve.service import Service
from imprint.serve.settings import Settings

ATTACK = "<script>alert(1)</script>"
NAMES = (ATTACK, '" onmouseover="alert(2)', "{{ 7 * 7 }}", "line\nbreak\u202ereversed")
CLASSES = ("<b>bold</b>", "'", "plain")


def make_hostile(folder: Path) -> Service:
    """Train a classifier of pictures of 2 × 2 pixels, and simulate its sources; nothing is validated."""
    torch.manual_seed(1)
    x, y = torch.rand(24, 4), torch.randint(0, 3, (24,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    form = imprint.PictureForm((2, 2), classes=CLASSES, low=0.0, high=1.0, flat=True)
    task = imprint.Task.classifier(model, form=form)
    sources = imprint.Sources.by_label([NAMES[place % 4] for place in range(24)])
    sources = sources.describe({NAMES[0]: About(owner=ATTACK, licence='"', url="https://example.com/?a=1")})
    plan = imprint.Plan(steps=3, lr=0.1)
    store = imprint.simulate(task, (x, y), sources, plan=plan, out=folder / "hostile", progress=False)
    return Service(task, store, settings=Settings())
