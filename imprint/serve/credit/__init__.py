"""What the service shows of its ledger: entries, totals, verification, disputes and statements."""

from imprint.serve.credit.desk import CreditDesk as CreditDesk

__all__ = ["CreditDesk"]
