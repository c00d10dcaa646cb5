"""Submit a command: load, decide, commit, answer.

Owns the order of those four, the batching of commits and the clock. Knows no rule (those are in `protocol`) and no SQL
(that is in `stores`). Nothing is answered before the flush that holds it, renewals excepted; after a failed flush it
stops for good. Start with `engine.py`.
"""
