"""Credit: from scores to shares, amounts, a tamper-evident log, and statements that publishers can check."""

from imprint.errors import MissingExtra

try:
    import cryptography as _cryptography  # noqa: F401
    import sqlalchemy as _sqlalchemy  # noqa: F401
except ImportError as error:
    raise MissingExtra("crediting sources", "serve") from error

from imprint.credit.disputes import dispute
from imprint.credit.heads import read_heads
from imprint.credit.ledger import Ledger, Receipt
from imprint.credit.money import MICRO, PARTS, Tariff
from imprint.credit.payloads import encode_queries
from imprint.credit.periods import close_period
from imprint.credit.policy import Division, Evidence, Policy
from imprint.credit.proofs import check_statement
from imprint.credit.statements import write_statements
from imprint.credit.verifying import verify

__all__ = [
    "MICRO",
    "PARTS",
    "Division",
    "Evidence",
    "Ledger",
    "Policy",
    "Receipt",
    "Tariff",
    "check_statement",
    "close_period",
    "dispute",
    "encode_queries",
    "read_heads",
    "verify",
    "write_statements",
]
