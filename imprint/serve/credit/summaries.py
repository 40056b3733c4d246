"""Sums of the ledger for the API and the pages: totals, comparisons, histories, periods and the verification."""

from typing import Any

from imprint.credit.heads import Head
from imprint.credit.leaves import Leaf
from imprint.credit.money import PARTS
from imprint.credit.periods import Account
from imprint.credit.periods import Totals as Sum
from imprint.credit.policy import Policy
from imprint.serve.credit import answers
from imprint.serve.credit.answers import Amount
from imprint.serve.credit.comparing import Change
from imprint.serve.credit.desk import CreditDesk
from imprint.serve.credit.scope import Scope
from imprint.serve.credit.tally import Signs


def sum_running(desk: CreditDesk, scope: Scope) -> answers.Totals:
    """Return the totals of the period that is not closed yet."""
    running = desk.running()
    totals = _sum(desk, scope, running.totals)
    return totals.model_copy(update={"first": running.first, "stop": running.stop})


def sum_days(desk: CreditDesk, scope: Scope, since: str | None, until: str | None) -> answers.Totals:
    """Return the totals from a day on, and before another; without pots of periods, which belong to no day."""
    desk.tally.catch_up()
    totals = _sum(desk, scope, desk.tally.between(since, until).totals)
    return totals.model_copy(update={"since": since, "until": until})


def _sum(desk: CreditDesk, scope: Scope, sums: Sum) -> answers.Totals:
    currency, names, waiting = desk.currency, desk.names, sums.without_pot * PARTS
    return answers.Totals(
        period=None,
        first=None,
        stop=None,
        since=None,
        until=None,
        queries=sums.entries,
        without_pot=sums.without_pot,
        total=Amount.of(sums.pot, currency),
        unattributed=Amount.of(sums.unattributed.amount, currency),
        unattributed_share=sums.unattributed.amount / sums.pot if sums.pot else None,
        rules=dict(sums.rules),
        validations=dict(sums.validations),
        sources=[
            answers.SourceTotal(
                source=name,
                name=names.get(name, name),
                queries=account.entries,
                share=account.amount / sums.pot if sums.pot else None,
                amount=Amount.of(account.amount, currency),
                by_size=Amount.of(account.by_size, currency),
                waiting=account.parts / waiting if waiting else None,
                low=None,
                high=None,
            )
            for name, account in sorted(sums.sources.items())
            if scope.sees(name)
        ],
        left_out=list(desk.tally.left_out),
        over_runs=False,
    )


def sum_closed(desk: CreditDesk, scope: Scope, closing: Leaf) -> answers.Totals:
    """Return the totals of a closed period, as the log has them."""
    about, currency = closing.about, desk.currency
    rest = about["unattributed"]["amount"]
    return answers.Totals(
        period=about["period"],
        first=about["first"],
        stop=about["stop"],
        since=None,
        until=None,
        queries=about["entries"],
        without_pot=about["without_pot"],
        total=Amount.of(about["total"], currency),
        unattributed=Amount.of(rest, currency),
        unattributed_share=rest / about["total"] if about["total"] else None,
        rules=about["rules"],
        validations=about["validations"],
        sources=[
            answers.SourceTotal(
                source=row["source"],
                name=desk.names.get(row["source"], row["source"]),
                queries=row["entries"],
                share=row["share"],
                amount=Amount.of(row["amount"], currency),
                by_size=Amount.of(row["by_size"], currency),
                waiting=None,
                low=row["low"],
                high=row["high"],
            )
            for row in scope.choose(closing.rows)
        ],
        left_out=[],
        over_runs=_is_over_runs(closing),
    )


def compare(desk: CreditDesk, scope: Scope, name: str, closing: Leaf | None) -> answers.ComparisonAnswer:
    """Return what sources get in a period, and what they would get under another policy."""
    policy: Policy = desk.find_policy(name)
    compared = desk.compare(policy, closing)
    return answers.ComparisonAnswer(
        period=None if closing is None else closing.about["period"],
        policy=name,
        explanation=policy.explain(policy.rule),
        queries=compared.queries,
        refused=compared.refused,
        left_out=compared.left_out,
        sources=[_describe_change(desk, change) for change in compared.rows if scope.sees(change.source)],
        unattributed=_describe_change(desk, compared.unattributed),
    )


def _describe_change(desk: CreditDesk, change: Change) -> answers.ChangeAnswer:
    known = change.amount is not None and change.other is not None
    return answers.ChangeAnswer(
        source=change.source,
        name=desk.names.get(change.source, change.source),
        amount=Amount.maybe(change.amount, desk.currency),
        other=Amount.maybe(change.other, desk.currency),
        difference=Amount.of((change.other or 0) - (change.amount or 0), desk.currency) if known else None,
        share=change.share,
        other_share=change.other_share,
    )


def describe_history(desk: CreditDesk, source: str) -> answers.History:
    """Return what a source got over time; by days, without pots of periods, which belong to none."""
    desk.tally.catch_up()
    days, currency, account, signs = desk.tally.days(source), desk.currency, Account(), Signs()
    for one, other in days.values():
        account.merge(one)
        signs.merge(other)
    known = next((each for each in desk.service.sources if each["id"] == source), None)
    size = signs.size if known is None else known["size"]
    lines = [line for closing in desk.periods() for line in closing.rows if line["source"] == source]
    since, waiting = desk.tally.running_of(source)
    amount, by_size = (sum(line[name] for line in lines) + getattr(since, name) for name in ("amount", "by_size"))
    return answers.History(
        source=source,
        name=desk.names.get(source, source),
        size=size,
        queries=account.entries,
        earned=signs.earned,
        clear=signs.clear,
        judged=signs.judged,
        waiting=waiting.waiting,
        amount=Amount.of(amount, currency),
        by_size=Amount.of(by_size, currency),
        per_example=amount / size if size else None,
        per_example_by_size=by_size / size if size else None,
        days=[
            answers.Day(
                day=day,
                queries=one.entries,
                earned=other.earned,
                amount=Amount.of(one.amount, currency),
                by_size=Amount.of(one.by_size, currency),
            )
            for day, (one, other) in days.items()
        ],
    )


def describe_periods(desk: CreditDesk, scope: Scope) -> list[answers.PeriodAnswer]:
    """Return the closed periods, the newest first."""
    head = desk.last_head()
    return [_describe_period(desk, scope, closing, head) for closing in reversed(desk.periods())]


def describe_changed_periods(desk: CreditDesk) -> list[answers.ChangedEntry]:
    """Return the closed periods whose figures are not shown."""
    reason = "it closed a period, and is not as it was written, or not confirmed by the signed log"
    return [answers.ChangedEntry(sequence=sequence, problems=[reason]) for sequence in desk.changed_periods()]


def _describe_period(desk: CreditDesk, scope: Scope, closing: Leaf, head: Head | None) -> answers.PeriodAnswer:
    about, currency = closing.about, desk.currency
    return answers.PeriodAnswer(
        period=about["period"],
        closed=about["time"],
        sequence=closing.sequence,
        first=about["first"],
        stop=about["stop"],
        queries=about["entries"],
        pot=Amount.maybe(about["pot"], currency),
        total=Amount.of(about["total"], currency),
        unattributed=Amount.of(about["unattributed"]["amount"], currency),
        remainder=Amount.of(about["remainder"], currency),
        signed=head is not None and head.size > closing.sequence,
        over_runs=_is_over_runs(closing),
        sources=[
            answers.PeriodLine(
                source=row["source"],
                name=desk.names.get(row["source"], row["source"]),
                queries=row["entries"],
                amount=Amount.of(row["amount"], currency),
                paid=Amount.of(row["units"] * about["smallest"], currency),
                by_size=Amount.of(row["by_size"], currency),
                share=row["share"],
                low=row["low"],
                high=row["high"],
            )
            for row in scope.choose(closing.rows)
        ],
    )


def _is_over_runs(closing: Leaf) -> bool:
    """Tell whether intervals take other training runs into account: only answers to "expected" rest on several."""
    return "expected" in closing.about["questions"]


def describe_head(desk: CreditDesk, head: Head) -> answers.HeadAnswer:
    """Return a signed head, and whether the key of the service signed it."""
    return answers.HeadAnswer(
        log=head.log,
        size=head.size,
        root=head.root.hex(),
        time=head.time,
        key=head.key,
        signed=desk.is_signed(head),
        **head.to_json(),
    )


def describe_verification(desk: CreditDesk, scope: Scope) -> answers.VerificationAnswer:
    """Return what the last verification found; its problems and remarks only for those who may see all lines."""
    state, running = desk.verifier.last, desk.verifier.running
    every = scope.is_all
    problems: list[Any] = [
        answers.ProblemAnswer(text=each.text, sequence=each.sequence, span=each.span, suspects=list(each.suspects))
        for each in state.problems
    ]
    return answers.VerificationAnswer(
        status=state.status,
        began=state.began,
        ended=state.ended,
        entries=state.entries,
        heads=state.heads,
        published_heads=state.published,
        signatures_checked=state.signed,
        seconds=state.seconds,
        count=state.count,
        problems=problems if every else [],
        remarks=list(state.remarks) if every else [],
        error=state.error if every else "",
        running=running is not None,
        done=0 if running is None else running.entries,
        total=0 if running is None else running.total,
    )


def list_sources(desk: CreditDesk, scope: Scope) -> list[str]:
    """Return the ids of the sources of the store and of the log that somebody may see."""
    desk.tally.catch_up()
    return sorted(name for name in {*desk.service.store.source_ids, *desk.tally.sources()} if scope.sees(name))
