"""Who may do what: the roles of keys, what each permits, and who a request comes from."""

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["query", "publisher", "auditor", "admin"]
Permission = Literal[
    "attribute",
    "credit",
    "see_sources",
    "see_store",
    "see_trust",
    "see_own_credit",
    "see_credit",
    "verify",
    "manage_keys",
]
ROLES: tuple[Role, ...] = get_args(Role)
PERMITTED: dict[Role, frozenset[Permission]] = {
    "query": frozenset({"attribute", "credit", "see_sources", "see_store"}),
    "publisher": frozenset({"see_store", "see_trust", "see_own_credit", "see_sources"}),
    "auditor": frozenset(
        {"attribute", "see_sources", "see_store", "see_trust", "see_own_credit", "see_credit", "verify"}
    ),
    "admin": frozenset(get_args(Permission)),
}


@dataclass(frozen=True)
class Identity:
    """Who a request comes from: a key, or a session that was opened with one.

    name: of the key; the ledger knows the caller as "key:NAME".
    sources: ids of the sources that a publisher may see; empty for other roles.
    csrf: the token that forms of the session carry; None for a key.
    """

    name: str
    role: Role
    sources: tuple[str, ...] = ()
    csrf: str | None = None

    def may(self, permission: Permission) -> bool:
        """Tell whether the role permits something."""
        return permission in PERMITTED[self.role]

    def sees(self, source: str) -> bool:
        """Tell whether the numbers of a source may be shown: a publisher sees those of its own sources alone."""
        return source in self.sources if self.role == "publisher" else self.may("see_sources")
