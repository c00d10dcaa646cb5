"""The replica side of a workspace: one directory on a disk that may vanish, and the verbs on it.

Owns resolving paths beneath the root by descriptor, the file verbs, patches, commands and what they leave, the tree and
its difference to a manifest, the journal beside the files, and the dial-out to the authority. Decides nothing: epochs,
log indexes and joins are the authority's, and what a disk holds counts only as far as its digests prove it.
Start with `beneath.py` (why no path gets out), then `files.py` (the verbs).
"""
