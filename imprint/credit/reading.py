"""Reads what a log says about itself: tariffs, policies, closed periods, and the heads that the database keeps."""

from sqlalchemy import Connection, func, select

from imprint.credit import log, tables
from imprint.credit.heads import Head
from imprint.credit.leaves import Kind, Leaf
from imprint.credit.money import Tariff
from imprint.credit.policy import Policy
from imprint.errors import CreditError, DamagedLog


def read_tariff(connection: Connection) -> Tariff:
    """Return the tariff that holds now."""
    return find_tariff(connection)[1]


def find_tariff(connection: Connection) -> tuple[int, Tariff]:
    """Return the tariff that holds now, after its place in the log."""
    leaf = _read_last(connection, "tariff")
    with log.translated_damage(f"entry {leaf.sequence}"):
        return leaf.sequence, Tariff(**leaf.about["tariff"])


def _read_last(connection: Connection, kind: Kind) -> Leaf:
    table = tables.kinds
    last = connection.execute(select(func.max(table.c.sequence)).where(table.c.kind == kind)).scalar_one()
    if last is None:
        raise DamagedLog(f"the log is damaged: it has no {kind}.")
    leaf = log.read_leaf(connection, last)
    if leaf.kind != kind:
        raise DamagedLog(f"the log is damaged: entry {last} is no {kind}. Run `imprint credit verify`.")
    return leaf


def read_policies(connection: Connection) -> dict[str, Policy]:
    """Return all policies of a log, by their hashes."""
    leaves = log.read_leaves(connection, 0, log.read_size(connection), "policy")
    with log.translated_damage("a policy of the log"):
        found = [Policy.from_json(leaf.about["policy"]) for leaf in leaves]
    return {policy.sha256: policy for policy in found}


def read_periods(connection: Connection) -> list[Leaf]:
    """Return the leaves that closed periods, in their order."""
    return list(log.read_leaves(connection, 0, log.read_size(connection), "period"))


def find_period(connection: Connection, name: str) -> Leaf:
    """Return the leaf that closed a period."""
    closed = read_periods(connection)
    found = next((leaf for leaf in closed if leaf.about["period"] == name), None)
    if found is None:
        known = ", ".join(leaf.about["period"] for leaf in closed) or "none"
        raise CreditError(f"no closed period is called {name!r}; closed so far: {known}.")
    return found


def read_kept_heads(connection: Connection) -> list[Head]:
    """Return the signed heads that the database keeps, in their order."""
    rows = connection.execute(select(tables.heads).order_by(tables.heads.c.size, tables.heads.c.time))
    return [Head.of(tables.read_bytes(row.head), tables.read_bytes(row.signature)) for row in rows]
