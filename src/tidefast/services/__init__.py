"""What an authority does with the rules: keeps leases, lets effects out, answers.

Owns the gateway (the only part that calls providers and the only one that holds their credentials), the sweep, and the
facade `Authority` that server and embedding programs talk to. Must not know HTTP routes, tokens or who is asking.
Start with `gateway.py`.
"""
