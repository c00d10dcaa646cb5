"""The refund desk: forty tickets, real processes, real kills, and the books at the end.

Owns the agent (`agent.py`), the two providers (`providers/`), the processes of the house (`house.py`), the run of the
desk from the first ticket to the exit code (`desk.py`) and what it tells people (`live.py`, `story.py`, `account.py`).
Must not know: the CLI's code; it starts `tidefast serve` and `tidefast worker` as anybody would. The faults come from
`tidefast.sim.injector`, which knows nothing of refunds.
"""
