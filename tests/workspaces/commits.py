"""This project's first hundred commits, from a bundle kept beside this file, as patches from tree to tree."""

import re
import subprocess
from pathlib import Path

BUNDLE = Path(__file__).with_name("commits.bundle")
COUNT = 100
PATCH_BYTES = 300_000  # a larger difference is several patches
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


class History:
    """The commits of the bundle, oldest first; `EMPTY_TREE` is number 0."""

    def __init__(self, top: Path) -> None:
        self._repo = top / "repo.git"
        subprocess.run(["git", "clone", "-q", "--bare", str(BUNDLE), str(self._repo)], check=True)
        named = self._git("rev-list", "--no-merges", "--topo-order", "--reverse", "--all").split()
        self.trees = [EMPTY_TREE, *named[:COUNT]]
        assert len(self.trees) == COUNT + 1, "the bundle holds fewer commits than are replayed"

    def patches(self, old: int, new: int) -> list[str]:
        """What makes commit `new` out of commit `old`, in patches of a bounded size."""
        whole = self._git("diff", "--no-renames", "--no-ext-diff", "--no-color", self.trees[old], self.trees[new])
        files = re.split(r"(?=^diff --git )", whole, flags=re.MULTILINE)
        patches = [""]
        for file in files:
            if patches[-1] and (len(patches[-1]) + len(file) > PATCH_BYTES or patches[-1].count("diff --git ") > 100):
                patches.append("")
            patches[-1] += file
        return [patch for patch in patches if patch]

    def _git(self, *words: str) -> str:
        told = subprocess.run(["git", "--git-dir", str(self._repo), *words], check=True, capture_output=True)
        return told.stdout.decode()
