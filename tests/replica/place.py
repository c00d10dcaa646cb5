"""A workspace's directory for tests, with something outside that no verb may reach."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.files import Done, Files
from tidefast.sdk.replica.refusals import NotDone
from tidefast.sdk.replica.staging import Stage
from tidefast.sdk.replica.tree import Tree, scan
from tidefast.wire.workspace import read_args

NO_TREE = Tree({}, {})


class Place:
    """A root with its verbs, each called by its name on the wire."""

    def __init__(self, path: Path, root: Root, allowed: frozenset[str] = frozenset()) -> None:
        self.path, self.root = path, root
        self.scans = True  # a fuzzer that asks for no delta needs no scan
        self.stage = Stage(root)
        self.files = Files(root, self.stage, allowed)

    def do(self, verb: str, **args: Any) -> Any:
        """The result of a verb. Raises `NotDone`."""
        said = self.done(verb, **args)
        return said.result if isinstance(said, Done) else said

    def done(self, verb: str, **args: Any) -> Any:
        more = (scan(self.root) if self.scans else NO_TREE,) if verb in ("delete", "move") else ()
        return getattr(self.files, verb)(read_args(verb, args), *more)

    def why(self, verb: str, **args: Any) -> str:
        """The reason of a refusal; says what happened if nothing was refused."""
        try:
            return f"done: {self.do(verb, **args)}"
        except NotDone as refusal:
            return refusal.reason

    def names(self) -> list[str]:
        """Everything beneath the root that is not the replica's own."""
        return sorted(
            os.path.relpath(os.path.join(top, name), self.path)
            for top, dirs, files in os.walk(self.path)
            for name in (*dirs, *files)
            if ".tidefast" not in top and name != ".tidefast"
        )


@contextmanager
def place(path: Path, *, use_openat2: bool | None = None, allowed: frozenset[str] = frozenset()) -> Iterator[Place]:
    path.mkdir(exist_ok=True)
    root = Root(path, use_openat2=use_openat2)
    here = Place(path, root, allowed)
    try:
        yield here
    finally:
        here.stage.close()
        root.close()
