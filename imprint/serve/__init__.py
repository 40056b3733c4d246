"""The service: attributions over HTTP, credited in the ledger, and pages that people read."""
