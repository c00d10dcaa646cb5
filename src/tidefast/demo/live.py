"""What people see while the desk works: a live picture on a terminal, plain lines elsewhere."""

import sys
import time
from collections import Counter, deque
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidefast.sim.injector import Happening

LINE_S = 2.0  # between two plain lines
SHOWN = 9  # happenings on the terminal
WORDS: Mapping[str, str] = {
    "killed": "{who} killed",
    "frozen": "{who} frozen",
    "thawed": "{who} thawed: it doesn't know yet that it was replaced",
    "takeover": "{who} takes the run over",
    "no takeover": "{who} was not replaced in time",
    "late": "a call of {who} arrives after its epoch has died",
    "struck": "the authority killed in the middle of this call",
    "restarted": "{who} started again",
    "died": "{who} ended by itself",
}
STYLES: Mapping[str, str] = {
    "killed": "red",
    "struck": "bold red",
    "frozen": "cyan",
    "thawed": "cyan",
    "died": "bold red",
}


def tell(happening: Happening) -> str:
    """A happening in a sentence."""
    text = WORDS[happening.what].format(who=happening.who)
    if happening.where and happening.what in ("killed", "frozen", "struck"):
        text += f", {happening.where}"
    if happening.run:
        step = f" {happening.step}" if happening.step else ""
        text += f" ({happening.run}{step}, epoch {happening.epoch})"
    return text


class Live:
    """Progress of the tickets and what has happened to the processes. `is_quiet`: says nothing at all."""

    def __init__(self, total: int, is_quiet: bool) -> None:
        self._total = total
        self._is_quiet = is_quiet
        self._started_s = time.monotonic()
        self._last_s = 0.0
        self._states: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._newest: deque[tuple[float, Happening]] = deque(maxlen=SHOWN)
        self.unsettled: list[str] = []  # runs with their states, for whoever asks what is stuck
        self._rich: RichLive | None = None
        if sys.stdout.isatty() and not is_quiet:
            self._rich = RichLive(console=Console(), refresh_per_second=8, transient=True, get_renderable=self._picture)
            self._rich.start()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._rich is not None:
            self._rich.console.print(text, highlight=False)
        elif not self._is_quiet:
            print(text, flush=True)

    def happened(self, happening: Happening) -> None:
        self._kinds[happening.what] += 1
        if happening.what.endswith("beside"):
            return
        self._newest.append((self.elapsed_s, happening))
        if self._rich is None and happening.what in ("struck", "died"):
            self.say(f"{self.elapsed_s:5.1f} s  {tell(happening)}")

    def progress(self, states: Mapping[str, int]) -> None:
        self._states = Counter(states)
        if self._rich is None and self.elapsed_s - self._last_s >= LINE_S:
            self._last_s = self.elapsed_s
            self.say(f"{self.elapsed_s:5.1f} s  {self._tickets()} | {self._deaths()}")

    def stop(self) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None

    def _tickets(self) -> str:
        states = self._states
        ended = states["completed"] + states["failed"]
        return f"{ended:2} of {self._total} tickets done, {states['leased']:2} in work, {states['held']} held"

    def _deaths(self) -> str:
        kinds = self._kinds
        told = (
            f"killed: {kinds['killed']} workers, {kinds['struck']} x the authority; frozen: {kinds['frozen']} workers"
        )
        return f"{told}; {kinds['takeover']} takeovers"

    def _picture(self) -> Group:
        states = self._states
        bar = ProgressBar(self._total, states["completed"] + states["failed"] + states["held"], width=60)
        table = Table.grid(padding=(0, 2))
        for at_s, happening in self._newest:
            style = STYLES.get(happening.what, "dim")
            table.add_row(Text(f"{at_s:5.1f} s", "dim"), Text(tell(happening), style))
        return Group(Text(f"{self._tickets()} | {self._deaths()}"), bar, table)
