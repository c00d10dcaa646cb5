"""Scenarios: orders of events that people argue about, each a text file with its answer and its expected trace.

They are played by the real engine, gateway, authority and store, and where the SDK is the subject by the real SDK. Made
up are three things: the clock, which moves when a script says so; the network between gateway and provider; and the
provider, which does what the script says and keeps its own count. Afterwards the auditor judges the logs by that count.
"""
