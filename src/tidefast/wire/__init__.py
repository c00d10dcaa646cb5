"""What crosses the network: request bodies, answers, problem details and lease tokens.

Owns the spelling of everything on the wire, for both ends: the server decodes what the client encodes with the same
structures. Decoding is strict: what isn't said plainly is refused, with a reason that names the field, and nothing is
coerced. A token is checked for who made it, never for whether its lease is live.

Must not know: stores, engine, services, sockets, clocks. Start with `messages.py` (what may be asked), then
`answers.py` (what is told) and `problem.py` (how a refusal is spelled).
"""
