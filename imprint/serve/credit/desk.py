"""The credit desk: reads one ledger for the API and the pages."""

from imprint.credit.ledger import Ledger
from imprint.serve.access import Access
from imprint.serve.service import Service
from imprint.serve.settings import Settings


class CreditDesk:
    """Reads the ledger of a service for those who may see it."""

    def __init__(self, ledger: Ledger, service: Service, access: Access, settings: Settings) -> None:
        self.ledger, self.service, self.access, self.settings = ledger, service, access, settings

    def start_verification(self) -> None:
        """Verify the log in a thread."""

    def close(self) -> None:
        """Stop what runs in threads."""
