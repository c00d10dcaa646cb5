"""HTTP in front of the services: who calls, with which lease, and how what they hear is spelled.

Owns the addresses, the order of the checks (framing, caller, lease token, live epoch, body), the limits of a
connection, and the loopback rule. Decides nothing about runs: each address is one call of the authority.

Must not know: SQL, providers, agents. Start with `routes.py` (the addresses), then `door.py` (the checks) and
`serve.py` (sockets and the end).
"""
