"""Proof that the laws hold: what folds, counts and convicts without asking the rules.

Owns the auditor of a store (`audit.py`), what it reads (`history.py`) and what a proof reports (`report.py`).

Must not know: the HTTP server, the CLI. Judges by `tidefast.protocol.laws`, never by `machine.decide`.
"""
