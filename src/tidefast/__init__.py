"""Tidefast runs AI agents on compute that may vanish.

An authority grants each run a lease whose epoch is a fencing token, keeps an append-only intent log, and lets an
effect out only under the live epoch, under a key that never changes, with its intent already durable.

The names that agent code needs are here; everything else is reached through its room.
"""

__version__ = "0.1.0"
