"""The command line: for people, and the place where the parts of a process are put together.

Owns the wiring (`wiring.py`; the server's own is `server/app.py`), the words and exit codes of errors (`errors.py`),
and what is printed. Decides nothing about runs, and prints nothing that came from outside without making it safe for a
terminal (`show.py`).

Must not know: SQL, HTTP addresses, rules. Start with `main.py`, which names a file for each group of commands.
"""
