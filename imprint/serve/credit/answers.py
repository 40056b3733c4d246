"""What the API says about credit, and pages show. Amounts are whole millionths, with a text for people."""

from typing import Any

from pydantic import BaseModel, Field

from imprint.credit.money import format_amount


class Amount(BaseModel):
    """An amount of money: exactly, in millionths of the currency's unit, and as text."""

    micro: int
    text: str

    @classmethod
    def of(cls, micro: int, currency: str) -> "Amount":
        """Return an amount with its text.

        >>> Amount.of(250_000, "EUR").text
        '0.25 EUR'
        """
        return cls(micro=micro, text=f"{format_amount(micro)} {currency}")

    @classmethod
    def maybe(cls, micro: int | None, currency: str) -> "Amount | None":
        """Return an amount; None where there is none."""
        return None if micro is None else cls.of(micro, currency)


class PolicyName(BaseModel):
    """A policy of the log."""

    sha256: str
    name: str
    version: int
    question: str
    rule: str


class Line(BaseModel):
    """What one source has of a credited query."""

    source: str
    name: str
    size: int = Field(description="Its training examples.")
    helped_by: float = Field(description="How much worse the result would have been without the source.")
    standard_error: float | None
    needed: float | None = Field(description="What helped_by must exceed to be credited; null if the rule has none.")
    share: float = Field(description="From 0 to 1.")
    amount: Amount | None = Field(description="Null where a pot for the whole period pays.")
    why: str


class Entry(BaseModel):
    """A credited query. `problems` says what in it is not as it was written; its figures then prove nothing."""

    sequence: int
    time: str
    query: str
    question: str
    measure: str
    validation: str
    policy: PolicyName | None
    rule: str
    reason: str = Field(description="Why it was not the policy's own rule; empty if it was.")
    explanation: str
    n: int = Field(description="How many training examples there were.")
    sources: int = Field(description="How many sources the query was divided among, shown or not.")
    pot: Amount | None = Field(description="What the query paid; null where a pot for the whole period pays.")
    unattributed: float
    unattributed_amount: Amount | None
    lines: list[Line]
    problems: list[str]


class ChangedEntry(BaseModel):
    """An entry that was changed since it was written, so that its figures are not shown."""

    sequence: int
    problems: list[str]


class Entries(BaseModel):
    """Some entries, the newest first. before: ask for the next ones with it; null at the beginning of the log."""

    entries: list[Entry | ChangedEntry]
    before: int | None


class HeadAnswer(BaseModel):
    """A signed head. `signed` tells whether the public key of the service signed it; null if it has none."""

    log: str
    size: int
    root: str
    time: str
    key: str
    signed: bool | None
    head: str
    signature: str


class ProofAnswer(BaseModel):
    """The proof that an entry is in the log that was signed. holds: null if no head covers the entry yet.

    head: the newest one that the proof leads to; if it leads to none, the newest of all.
    span: if it leads to none, the first and the last of the entries among which one was changed.
    leaf: null too if the entry has parts that the key may not see.
    """

    holds: bool | None
    span: tuple[int, int] | None
    head: HeadAnswer | None
    leaf: dict[str, Any] | None
    lines: list[dict[str, Any]]


class EntryAnswer(BaseModel):
    """An entry of any kind, with its proof. `credit` is null for other kinds, and for an entry that was changed."""

    sequence: int
    kind: str | None
    time: str | None
    about: dict[str, Any] | None = Field(description="What an entry of another kind says.")
    credit: Entry | None
    problems: list[str]
    proof: ProofAnswer | None


class SourceTotal(BaseModel):
    """What one source got. waiting: its part of the pot of the period that is still to be divided, from 0 to 1."""

    source: str
    name: str
    queries: int
    share: float | None = Field(description="Of everything that was paid, from 0 to 1.")
    amount: Amount
    by_size: Amount = Field(description="What a rule by size alone would have given.")
    waiting: float | None
    low: float | None = Field(description="The 95% interval of the share; null for periods that are not closed.")
    high: float | None


class Totals(BaseModel):
    """What some queries paid, and to whom. left_out: entries that were changed, and are in no total.

    over_runs: whether intervals say what other training runs would change, and not only other queries.
    """

    period: str | None
    first: int | None
    stop: int | None
    since: str | None
    until: str | None
    queries: int
    without_pot: int
    total: Amount
    unattributed: Amount
    unattributed_share: float | None
    rules: dict[str, int]
    validations: dict[str, int]
    sources: list[SourceTotal]
    left_out: list[int]
    over_runs: bool


class ChangeAnswer(BaseModel):
    """What a source gets, and what it would get under another policy; amounts are null until the pot is known."""

    source: str
    name: str
    amount: Amount | None
    other: Amount | None
    difference: Amount | None
    share: float
    other_share: float


class ComparisonAnswer(BaseModel):
    """A period as it was divided, and by another policy.

    queries: those that are compared. refused: queries that answer another question than the policy pays for.
    left_out: entries that were changed. Neither are compared: amounts are those of the compared queries alone, also of
    a pot that pays for all queries of the period.
    """

    period: str | None
    policy: str
    explanation: str
    queries: int
    refused: int
    left_out: int
    sources: list[ChangeAnswer]
    unattributed: ChangeAnswer


class Day(BaseModel):
    """What a source got on one day, in UTC."""

    day: str
    queries: int
    earned: int
    amount: Amount
    by_size: Amount


class History(BaseModel):
    """What a source got over time: in closed periods, with their pots, and of queries with pots of their own since.

    clear: queries on which the 95% interval of its effect leaves out 0, of the `judged` ones.
    waiting: queries that the pot of the period pays which is not closed yet; they count 0 until it is.
    days: without pots of periods, which belong to no day.
    """

    source: str
    name: str
    size: int
    queries: int
    earned: int
    clear: int
    judged: int
    waiting: int
    amount: Amount
    by_size: Amount
    per_example: float | None = Field(description="Millionths per training example.")
    per_example_by_size: float | None
    days: list[Day]


class ProblemAnswer(BaseModel):
    """Something that is not as it was written. sequence: the entry; span: the first and last among which it is.

    suspects: entries each of which would explain it alone, if two sources exchanged their figures there.
    """

    text: str
    sequence: int | None
    span: tuple[int, int] | None
    suspects: list[int]


class VerificationAnswer(BaseModel):
    """What the last verification found, and how far the one is that runs.

    status: "never", "holds", "problems", or "failed", which means that it could not be finished.
    """

    status: str
    began: str | None
    ended: str | None
    entries: int
    heads: int
    published_heads: int
    signatures_checked: bool
    seconds: float
    count: int
    problems: list[ProblemAnswer]
    remarks: list[str]
    error: str
    running: bool
    done: int
    total: int


class PeriodLine(BaseModel):
    """What a source is paid for a period."""

    source: str
    name: str
    queries: int
    amount: Amount
    paid: Amount
    by_size: Amount
    share: float | None
    low: float | None
    high: float | None


class PeriodAnswer(BaseModel):
    """A closed period, and what sources are paid for it.

    over_runs: whether intervals say what other training runs would change, and not only other queries.
    """

    period: str
    closed: str
    sequence: int
    first: int
    stop: int
    queries: int
    pot: Amount | None = Field(description="What queries without a pot of their own shared; null if there were none.")
    total: Amount
    unattributed: Amount
    remainder: Amount
    signed: bool = Field(description="Whether a head was signed since, so that there are statements.")
    over_runs: bool
    sources: list[PeriodLine]
