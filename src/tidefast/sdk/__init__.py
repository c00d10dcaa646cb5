"""What agent code and its workers use: `App`, `Run`, the worker, and the errors that they raise.

Owns the pass (one execution of an agent's function under one lease), the journal's answers, the waiting, and the
worker's heartbeats. Must not know how an authority decides: it asks one through `authority.Authority`, and every rule
it seems to apply (a lease that lapsed, a call that drifted) is checked there again.
Start with `run.py` (what the agent sees), then `line.py` (what it waits for), then `passes.py`.
"""
