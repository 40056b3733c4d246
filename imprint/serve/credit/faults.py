"""Finds what does not follow in a credited query that fits its hash, before anybody verifies the log.

Whoever writes to the database can make an entry fit its hash again. Its shares and amounts still have to follow from
its scores and its policy: entries of which they do not are shown as changed, and are in no total.
"""

from collections.abc import Mapping

from imprint.credit import log
from imprint.credit.leaves import Leaf
from imprint.credit.policy import Policy
from imprint.credit.recomputing import find_faults
from imprint.errors import CreditError

CHANGED = "its content was changed or removed since it was written, so its figures are not shown"


def read_policy(leaf: Leaf) -> dict[str, Policy]:
    """Return a policy of the log by its hash; nothing if it was written by hand, which verification names."""
    try:
        with log.translated_damage(f"entry {leaf.sequence}"):
            policy = Policy.from_json(leaf.about["policy"])
    except CreditError:
        return {}
    return {policy.sha256: policy}


def find_wrong(leaf: Leaf, policies: Mapping[str, Policy], currency: str = "") -> list[str]:
    """Return what does not follow in a credited query; nothing if all does. policies: those of the log, by hash."""
    policy = policies.get(leaf.about["policy"])
    if policy is None:
        return ["it names a policy that is not in the log"]
    try:
        with log.translated_damage(f"entry {leaf.sequence}"):
            return list(find_faults(leaf, policy, currency))
    except CreditError:
        return [CHANGED]
