"""The quickstarts of the page on language models are short, and credit whom they say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "language.md"


def test_the_quickstarts_are_short_and_credit_who_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    completion, words, credited, fine_tune, replayed, tomorrow, validated, looped, aimed, chats, packed = blocks
    page: dict[str, Any] = {}
    for code in (completion, fine_tune):
        assert len(code.splitlines()) < 40
    exec(completion, page)
    assert [query[0].name for query in page["result"].top(1, by="lowers")] == ["harbour", "kennel"]
    exec(words, page)
    assert max(page["tokens"].words("kennel"), key=lambda word: word[1])[0] == " fence"
    exec(credited, page)
    assert Path("completions.html").read_text(encoding="utf-8").count("<section>") == 2
    assert page["tokens"].credited().name == "harbour"
    exec(fine_tune, page)
    assert [query[0].name for query in page["result"].top(1, by="lowers")] == ["ann", "ben"]
    exec(replayed, page)
    assert [query[0].name for query in page["result"].top(1, by="lowers")] == ["ann", "ben"]
    assert page["result"].question == "this_run"
    store, adapter = page["replayed"], dict(page["tuned"].state_dict())
    trained = {name: tensor.clone() for name, tensor in adapter.items()}
    for name, tensor in adapter.items():
        tensor += "lora_" in name  # as another session would make it
    exec(tomorrow, page)
    assert page["replayed"].sha256 == store.sha256
    assert all(torch.equal(tensor, trained[name]) for name, tensor in page["tuned"].state_dict().items())
    exec(validated, page)
    assert page["comparison"].outcome in ("ranks validated", "sizes validated")
    exec(looped, page)
    assert [query[0].name for query in page["result"].top(1, by="lowers")] == ["ann", "ben"]
    assert page["result"].question == "this_run"
    exec(aimed, page)
    again = page["imprint"].attribute(page["task"], page["store"], page["queries"])
    assert [query[0].name for query in again.top(1, by="lowers")] == ["ann", "ben"]
    exec(chats, page)
    assert [query[0].name for query in page["result"].top(1, by="lowers")] == ["ann", "ben"]
    exec(packed, page)
    assert page["result"].top(1, by="lowers")[0][0].name == "ann"
    assert page["result"].question == "this_run"
