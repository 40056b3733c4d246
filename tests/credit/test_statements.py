"""Statements: what a publisher reads, and what it can prove without the ledger and without seeing anybody else."""

import csv
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from imprint.credit import Ledger, Policy
from imprint.credit.heads import sign_head
from imprint.credit.leaves import hash_line
from imprint.credit.money import MICRO
from imprint.credit.naming import name_files
from imprint.credit.periods import close_period
from imprint.credit.proofs import CheckedStatement, check_statement
from imprint.credit.statements import COLUMNS, write_statements
from imprint.errors import CreditError
from tests.credit.crediting import EXPECTED, fill, make_ledger, make_result

KEY = Ed25519PrivateKey.generate()


@pytest.fixture
def statements(ledger: Ledger, tmp_path: Path) -> Path:
    """The statements of a period of 14 queries, before which there was another one."""
    fill(ledger, (2,))
    close_period(ledger, "2026-10")
    fill(ledger, (9, 5), pot=500_000)
    close_period(ledger, "2026-11")
    ledger.sign_head(KEY)
    write_statements(ledger, "2026-11", tmp_path / "out", terms={"Payer": "Acme Ltd"}, progress=False)
    return tmp_path / "out"


def check(place: Path) -> CheckedStatement:
    return check_statement(place, KEY.public_key())


def read(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.read_text().splitlines()]


def change(place: Path, edit: Any) -> CheckedStatement:
    """Check a statement that was edited."""
    lines = read(place)
    lines = edit(lines) or lines
    other = place.with_name("edited.jsonl")
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check(other)


def test_a_statement_proves_what_it_says(statements: Path, ledger: Ledger) -> None:
    closing = next(leaf for leaf in ledger.entries(kind="period") if leaf.about["period"] == "2026-11")
    for row in closing.rows:
        found = check(statements / f"{row['source']}.jsonl")
        assert found.holds and found.entries == 14
        assert (found.amount, found.units, found.currency) == (row["amount"], row["units"], "EUR")
        assert repr(found).startswith(f"holds: {row['source']}, 2026-11: ")


def test_it_shows_nothing_of_other_sources(statements: Path) -> None:
    text = (statements / "times.jsonl").read_text()
    assert "times" in text and not any(
        f'"{name}"' in text or f'\\"{name}\\"' in text for name in ("blog", "post", "wire")
    )
    page = (statements / "times.html").read_text()
    assert not any(name in page for name in ("blog", "wire"))


def test_the_salt_of_one_line_does_not_open_another(statements: Path, ledger: Ledger) -> None:
    """Amounts are few: without salts, a publisher could try them all against the hashes beside its own."""
    item = read(statements / "times.jsonl")[2]
    entry = ledger.entry(json.loads(item["header"])["sequence"])
    mine = bytes.fromhex(item["salt"])
    siblings = {bytes.fromhex(node) for node in item["path"]}
    assert not any(hash_line(mine, line) in siblings or hash_line(b"", line) in siblings for line in entry.lines)


def replaced(name: str, old: str, new: str) -> Any:
    """Replace a part of the second query of a statement."""
    return lambda lines: lines[3].update({name: lines[3][name].replace(old, new)})


FORGERIES: dict[str, tuple[Any, str]] = {
    "an amount": (replaced("line", '"amount":', '"amount":9'), "is not the one that the log has"),
    "another's line": (replaced("line", "times", "wire"), "is not the one that the log has"),
    "a header": (replaced("header", "500000", "900000"), "is not in the signed log"),
    "a missing query": (lambda lines: lines[:3] + lines[4:], "the period has 14 queries, the statement 13"),
    "a query twice": (lambda lines: [*lines, lines[3]], "is listed twice"),
    "no policy": (lambda lines: lines[:-1], "a policy that queries were credited by is not"),
    "another salt": (lambda lines: lines[3].update(salt="00" * 16), "is not the one that the log has"),
    "another proof": (lambda lines: lines[3].update(proof=lines[4]["proof"]), "is not in the signed log"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_statement_does_not_hold(kind: str, statements: Path) -> None:
    edit, expected = FORGERIES[kind]
    found = change(statements / "times.jsonl", edit)
    assert not found.holds and any(expected in problem for problem in found.problems), found.problems
    assert "does not hold" in repr(found)


def test_a_statement_of_another_source_or_period_is_refused(statements: Path) -> None:
    with pytest.raises(CreditError, match="does not prove how its period was closed: the statement closes another"):
        change(statements / "times.jsonl", lambda lines: lines[0].update(period="2026-10"))
    with pytest.raises(CreditError, match=r"does not prove how its period was closed: .* is that of another source"):
        change(statements / "times.jsonl", lambda lines: lines[0].update(source="wire"))


def test_another_key_and_files_that_are_no_statements_are_refused(statements: Path, tmp_path: Path) -> None:
    with pytest.raises(CreditError, match="was not signed with key"):
        check_statement(statements / "times.jsonl", Ed25519PrivateKey.generate().public_key())
    for text in ("", "{}", "[]", "null\n", '{"kind": "imprint statement"}\n', "\xff", '{"a": NaN'):
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(CreditError):
            check(tmp_path / "other.jsonl")
    with pytest.raises(CreditError, match="there is no file"):
        check(tmp_path / "missing.jsonl")


def test_a_publisher_who_holds_another_head_sees_that_the_log_was_rewritten(statements: Path, tmp_path: Path) -> None:
    head = check(statements / "times.jsonl").head
    forged = sign_head(KEY, head.log, head.size, b"0" * 32, head.time)
    found = check_statement(statements / "times.jsonl", KEY.public_key(), earlier=[head, forged])
    assert len(found.problems) == 1 and "nothing proves that the log grew from the head" in found.problems[0]


def test_heads_that_were_signed_later_do_not_make_a_statement_wrong(statements: Path, ledger: Ledger) -> None:
    """A publisher who checks an old statement with all heads that were ever published must not be alarmed."""
    fill(ledger, (2,))
    later = ledger.sign_head(KEY)
    found = check_statement(statements / "times.jsonl", KEY.public_key(), earlier=[*ledger.heads(), later])
    assert found.holds and found.heads == 1 and found.later == 2
    assert "2 heads that you hold came later" in repr(found) and ledger.name in repr(found)


def test_a_log_that_was_cut_short_before_a_statement_is_noticed(statements: Path) -> None:
    head = check(statements / "times.jsonl").head
    longer = sign_head(KEY, head.log, head.size + 5, b"1" * 32, "2020-01-01T00:00:00.000000Z")
    found = check_statement(statements / "times.jsonl", KEY.public_key(), earlier=[longer])
    assert not found.holds and f"nothing proves that the log grew from the head of {head.size + 5}" in found.problems[0]


def test_a_pot_of_the_period_is_proved_up_to_a_micro_unit(place: str, tmp_path: Path) -> None:
    ledger = make_ledger(place, per_query=None)
    fill(ledger, (3, 4))
    close_period(ledger, "p", pot=10 * MICRO)
    ledger.sign_head(KEY)
    write_statements(ledger, "p", tmp_path / "out", progress=False)
    assert check(tmp_path / "out" / "wire.jsonl").holds
    found = change(tmp_path / "out" / "wire.jsonl", lambda lines: lines[:2] + lines[3:])
    assert any("do not add up to" in problem for problem in found.problems)
    ledger.close()


def test_tables_have_a_row_for_each_query(statements: Path) -> None:
    rows = list(csv.DictReader((statements / "times.csv").open()))
    table = pyarrow.parquet.read_table(statements / "times.parquet").to_pylist()
    assert tuple(rows[0]) == COLUMNS == tuple(table[0]) and len(rows) == len(table) == 14
    for row, other in zip(rows, table, strict=True):
        assert row["query"] == other["query"] and float(row["share"]) == other["share"]
        assert float(row["amount"]) == other["amount"] and row["currency"] == other["currency"] == "EUR"
        assert abs(other["share"] * other["pot"] - other["amount"]) < 1.001 / MICRO
    paid = sum(other["amount"] for other in table)
    assert paid == pytest.approx(check(statements / "times.jsonl").amount / MICRO)


def test_the_page_says_who_gets_what_why_how_sure_and_how_to_check_it(statements: Path) -> None:
    text = (statements / "times.html").read_text()
    page = " ".join(re.sub("<d[td]>|</d[td]>", " ", text).split())
    found = check(statements / "times.jsonl")
    for text in (
        f"{found.units * found.smallest / MICRO:.2f} EUR",
        "Of 14 queries, your source earned a share of",
        "With other training runs and other queries of the same kind, your share would probably lie between",
        "(95% interval, from 4 training runs and 14 queries)",
        "of the 7.00 EUR that the queries of this period paid (14 queries at 0.5 EUR);",
        "EUR stayed unattributed",
        "“Needed” is 3.18 times the standard error.",
        "compare the amount that it prints with the one above",
        "Take it from your contract or the payer’s website",
        "each of them names the policy above",
        "how much your data helps on average",
        "so that the 95% interval of the help lies above 0",
        "8 removals, of 8 different sources in all, each in 3 training runs",
        "the log does not say whether they are among those paid here",
        "5 of 40 training examples",
        "Payer Acme Ltd",
        "number of training examples",
        "imprint credit check times.jsonl --public-key",
        found.head.key,
    ):
        assert text in page, text
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def write_page(place: str, folder: Path, policy: Policy, helps: list[list[float]], pot: int | None = None) -> str:
    """Write the statement of "times", the third source, whose effects have standard errors of about 0.05."""
    ledger = make_ledger(place)
    result = replace(make_result(len(helps)), scores=-40 * torch.tensor(helps, dtype=torch.float64))
    ledger.credit(result, policy, pot=pot)
    close_period(ledger, "p")
    ledger.sign_head(KEY)
    page = write_statements(ledger, "p", folder, sources=["times"], progress=False)[0].read_text()
    ledger.close()
    return " ".join(page.split())


def test_harm_is_stated_only_where_it_is_as_clear_as_help_must_be(place: str, tmp_path: Path) -> None:
    helps = [[0.5, 0.5, help, 0.5] for help in (9.0, 8.0, 0.001, -0.001, 0.0, -9.0)]
    page = write_page(place, tmp_path, EXPECTED, helps)
    assert "Of 6 queries, your source earned a share of 2; nothing is deducted for the others. Of those, 1 had" in page
    assert (
        "and for 3 its effect, help or harm, is less than “needed”." in page and page.count('<td class="number">+') == 2
    )


def test_a_rule_without_a_threshold_claims_no_harm(place: str, tmp_path: Path) -> None:
    page = write_page(place, tmp_path, replace(EXPECTED, rule="positive_part"), [[0.5, 0.5, -9.0, 0.5]] * 3)
    assert "earned a share of none" in page and "for 3 the rule gives it nothing." in page
    assert "worse result because" not in page and "“Needed” is" not in page


def test_a_source_that_earned_nothing_gets_no_table(place: str, tmp_path: Path) -> None:
    page = write_page(place, tmp_path, EXPECTED, [[0.5, 0.5, -9.0, 0.5]] * 3)
    assert "No query earned a share." in page and "<table>" not in page


@pytest.mark.parametrize(("queries", "cut"), [(12, False), (13, True)])
def test_a_table_that_is_cut_says_that_it_does_not_add_up(place: str, tmp_path: Path, queries: int, cut: bool) -> None:
    page = write_page(place, tmp_path, EXPECTED, [[0.5, 0.5, 9.0, 0.5]] * queries)
    assert ("the rows do not add up to your amount" in page) == cut


def test_the_amount_by_size_is_rounded_as_it_would_be_paid(place: str, tmp_path: Path) -> None:
    """Thirds of a cent that every query rounds away would add up to a wrong last digit."""
    page = write_page(place, tmp_path, EXPECTED, [[0.5, 0.5, 9.0, 0.5]] * 7, pot=100_003)
    assert "would have given about 0.09 EUR" in page


def test_bars_have_their_labels_as_text_that_does_not_shrink_on_a_phone(statements: Path, ledger: Ledger) -> None:
    page = (statements / "times.html").read_text()
    (row,) = [row for leaf in ledger.entries(kind="period") for row in leaf.rows[2:3] if leaf.about["entries"] == 14]
    assert "<text" not in page and page.count("<rect") == 2 and page.count("<line") == 1
    labels = re.findall(r'<p class="bar">(.*?)</p>', page)
    assert labels[0].startswith(f"Paid <strong>{100 * row['share']:.1f}%</strong> ({100 * row['low']:.1f}% to ")
    assert labels[1].startswith("By size <strong>")
    widths = [float(width) for width in re.findall(r'<rect class="\w+" width="([\d.]+)"', page)]
    ends = [float(end) for end in re.findall(r'<line .*x1="([\d.]+)" x2="([\d.]+)"', page)[0]]
    assert max(*widths, *ends) == 99 and ends[0] < widths[0] < ends[1]


def test_a_statement_says_that_repeated_queries_are_not_recognised(statements: Path) -> None:
    page = " ".join((statements / "times.html").read_text().split())
    assert "Each credited query counts as a new one: one that was credited several times is not recognised" in page


def test_names_of_sources_are_shown_and_do_nothing_else(place: str, tmp_path: Path) -> None:
    ledger = make_ledger(place)
    names = ("<script>alert(1)</script>", "=cmd|' /C calc'!A0", "../../etc/passwd", "a/b")
    ledger.credit(make_result(2, source_ids=names, source_names=names), EXPECTED)
    close_period(ledger, "p")
    ledger.sign_head(KEY)
    pages = write_statements(ledger, "p", tmp_path / "out", progress=False)
    assert all(page.parent == tmp_path / "out" for page in pages) and len(set(pages)) == 4
    assert not any("<script>" in page.read_text() for page in pages)
    assert all(check(page.with_suffix(".jsonl")).holds for page in pages)
    ledger.close()


def test_sources_whose_names_make_the_same_file_get_files_of_their_own() -> None:
    names = name_files(["a/b", "a b", "A-B", "..", "", "a-b"])
    assert len({name.lower() for name in names.values()}) == 6 and not any("/" in name for name in names.values())


@pytest.mark.parametrize(
    "sources",
    [
        ["times", " times", "times.", "-times"], ["é", "e\u0301"], ["ß", "SS", "ss"], ["A", "a"], ["İ", "i̇"],
        ["CON", "con", "nul", "aux.txt", "COM1"], ["..", "", ".", " "], ["a b", "a-b"],
        ["𝔘" * 300, "𝔘" * 301, "𝔘" * 60, "é" * 60],
        ["times", " times", name_files(["times", " times"])[" times"]],
    ],
    ids=lambda names: ascii(names)[:40],
)  # fmt: skip
def test_file_names_differ_on_every_file_system(sources: list[str]) -> None:
    names = list(name_files(sources).values())
    for form in ("NFC", "NFD", "NFKD"):
        assert len({unicodedata.normalize(form, name).casefold() for name in names}) == len(sources)
    for name in names:
        assert len(f"{name}.parquet".encode()) <= 255 and name == name.strip(" .") and "/" not in name
        assert name.split(".")[0].lower() not in ("con", "nul", "aux", "com1", "")


def test_a_plain_name_is_kept_whoever_else_there_is() -> None:
    """Otherwise a source could take the file name of another one."""
    names = name_files([" times", "Post", "times", "times-", "a b", "a/b", "Le Monde"])
    assert names["times"] == "times" and names["Post"] == "Post"
    assert names["Le Monde"] == "Le-Monde" and names["a b"] == "a-b"
    assert re.fullmatch("times-[0-9a-f]{8}", names[" times"]) and re.fullmatch("a-b-[0-9a-f]{8}", names["a/b"])


def test_a_statement_that_could_not_be_checked_is_not_written(place: str, tmp_path: Path) -> None:
    ledger, names = make_ledger(place), ("a", "b", "c", "d" * 1_200_000)
    ledger.credit(make_result(2, source_ids=names, source_names=names), EXPECTED)
    close_period(ledger, "p")
    ledger.sign_head(KEY)
    with pytest.raises(CreditError, match="nobody could check it"):
        write_statements(ledger, "p", tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").iterdir())
    ledger.close()


def test_a_statement_needs_a_closed_period_and_a_head_after_it(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, (2,))
    with pytest.raises(CreditError, match="needs a signed head"):
        write_statements(ledger, "p", tmp_path, progress=False)
    ledger.sign_head(KEY)
    with pytest.raises(CreditError, match="no closed period is called 'p'; closed so far: none"):
        write_statements(ledger, "p", tmp_path, progress=False)
    close_period(ledger, "p")
    with pytest.raises(CreditError, match="signed before the period p was closed"):
        write_statements(ledger, "p", tmp_path, progress=False)
    ledger.sign_head(KEY)
    with pytest.raises(CreditError, match="'nobody' was not credited in the period p"):
        write_statements(ledger, "p", tmp_path, sources=["nobody"], progress=False)
    assert len(write_statements(ledger, "p", tmp_path, sources=["wire"], progress=False)) == 1


def test_what_a_fallback_paid_is_named(place: str, tmp_path: Path) -> None:
    ledger = make_ledger(place)
    ledger.credit(make_result(2, figures=None), Policy("p", "expected", fallback="by_size"))
    close_period(ledger, "p")
    ledger.sign_head(KEY)
    page = write_statements(ledger, "p", tmp_path, sources=["wire"], progress=False)[0].read_text()
    assert "not validated" in page and "in proportion to its number of training examples" in page
    ledger.close()
