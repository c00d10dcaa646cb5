"""`tidefast completion`: what a shell reads to complete commands, flags and choices."""

import sys
from typing import Literal

from tidefast.cli import show as out
from tidefast.cli.errors import ExitCode

HOW = {
    "bash": "put into ~/.bashrc:  source <(tidefast completion bash)",
    "zsh": "run once:  tidefast completion zsh > ${fpath[1]}/_tidefast  and start a new shell",
    "fish": "run once:  tidefast completion fish > ~/.config/fish/completions/tidefast.fish",
}


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print what makes SHELL complete commands, flags and choices.

    bash: `source <(tidefast completion bash)` in ~/.bashrc. fish and zsh: into a file among their completions.
    """
    from tidefast.cli.main import build  # the program describes itself

    if out.is_for_people():
        print(HOW[shell], file=sys.stderr)
    out.write(build().generate_completion(prog_name="tidefast", shell=shell).rstrip())
    return ExitCode.OK
