"""The outside world of the refund desk: a card provider and a mail service, each a process of its own.

They share nothing with Tidefast but the network: real HTTP, their own SQLite ledgers, and their own count of
what they did. The demo's books compare that count with Tidefast's log.
"""
