"""The rules, and nothing else.

Owns every rule about who may do what: leases, steps, doubt, checkpoints, compensation. `decide` judges a command
against a view, `evolve` advances the view by one event, `needs` says beforehand which rows a rule must see.

Must not know: clocks, sockets, threads, randomness, SQL, logging. Equal arguments give equal decisions, for ever.
Start with `records.py` (the nouns), then `machine.py` (the three doors), then `step.py` (the heart).
"""
