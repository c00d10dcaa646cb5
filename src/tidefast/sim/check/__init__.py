"""Exhaustive search: every order of everything that can happen to one small run, over the real rules.

`configs.py` says how small, `world.py` what a state is and when two are the same, `moves.py` what can happen,
`properties.py` what must hold, `search.py` walks breadth first, `trace.py` tells what it found. No rule of the protocol
is written here a second time: states move by `decide` and `evolve` alone.
"""
