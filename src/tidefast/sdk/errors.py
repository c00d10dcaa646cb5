"""What the SDK raises, and what agents and tools raise to say something.

    Exception
    ├── Error                something that agent code and programs may catch
    │   ├── Rejected           a step was finally refused; the receipt says how
    │   ├── Held               a step of an independent tool waits for a person; the others may go on
    │   ├── LimitReached       a step would go over a limit or a budget; nothing was sent
    │   ├── Misuse             the program asks for what can't be: a repeated step id, arguments that aren't JSON
    │   ├── Unavailable        nobody answers; whatever was asked may be asked again
    │   │   └── OutcomeUnknown   a verb that is not safe to repeat may have arrived: look before you repeat it
    │   ├── CallRefused        the authority refuses a call of a client; `code`, `reason` and `facts` say why
    │   │   ├── NotFound         there is no such run or step
    │   │   ├── NotAllowed       the key is missing, unknown, or not for this
    │   │   └── Conflict         things aren't as the call assumes: another input, a moved epoch, nothing to decide
    │   ├── RunFailed          the run whose result was asked for ended without one
    │   └── NotYet             it has not ended in the time that was given (also a `TimeoutError`)
    ├── Fail           an agent raises it to end its run for a stated reason
    ├── Refused        a python tool raises it: definitely not done, and final for these arguments
    └── NotSent        a python tool raises it: definitely not done, because nothing was sent
    BaseException
    ├── Preempted      the lease is lost: another worker may be driving this run by now
    └── PassEnded      this pass is over, the run isn't: a step is held, the run is frozen, the worker shuts down

The last two aren't `Exception`s, so that a broad `except Exception` can't keep a zombie going. Each one says what
happened, why, and what to do next; none carries a token.
"""

from collections.abc import Mapping
from typing import Any, Literal

from tidefast.protocol.canonical import JSON

ReleaseReason = Literal["done", "error", "held", "shutdown", "drift"]


def _sentence(what: str, why: str, next_: str) -> str:
    return ". ".join(part.rstrip(".") for part in (what, why, next_) if part)


class Error(Exception):
    """Something went wrong that agent code may catch. `what` happened, `why`, and what to do `next`."""

    def __init__(self, what: str, why: str = "", next: str = "") -> None:  # noqa: A002 - read as error.next
        super().__init__(_sentence(what, why, next))
        self.what, self.why, self.next = what, why, next


class Rejected(Error):
    """The step was finally refused and had no effect. Its answer stays the same for ever; another try is a new step.

    `receipt` is the refusal as it is stored (`{status, content_type, body, …}`), None where nothing was sent.
    """

    def __init__(self, step_id: str, reason: str, receipt: Any = None) -> None:
        super().__init__(
            f"step {step_id} was rejected ({reason})",
            "its provider refused it for good, and nothing took effect",
            "go on without it, raise tidefast.Fail, or try again as another step",
        )
        self.step_id, self.reason, self.receipt = step_id, reason, receipt

    @property
    def body(self) -> Any:
        """The body of the refusal, None if there is none."""
        return self.receipt.get("body") if isinstance(self.receipt, Mapping) else None


class Held(Error):
    """A step of an independent tool waits for a person. The agent may go on; the run can't end before it is settled."""

    def __init__(self, step_id: str, reason: str) -> None:
        why = "what became of it is unknown, and nothing may be done automatically"
        super().__init__(f"step {step_id} is held ({reason})", why, "go on without it, or let this exception through")
        self.step_id, self.reason = step_id, reason


class LimitReached(Error):
    """A step would go over a limit of its tool or over a budget. Nothing was written and nothing was sent."""

    def __init__(self, step_id: str, facts: Mapping[str, JSON]) -> None:
        super().__init__(
            f"step {step_id} would go over a limit",
            f"{facts.get('budget')} allows {facts.get('limit')} {facts.get('member')}",
            f"go on without it, or let an operator raise the limit: {facts.get('command')}",
        )
        self.step_id, self.facts = step_id, dict(facts)


class Misuse(Error):
    """The program asks for something that can't be. Nothing was written and nothing was sent."""


class Unavailable(Error):
    """The authority doesn't answer. Whether it acted is unknown; everything asked of it may be asked again."""


class OutcomeUnknown(Unavailable):
    """A verb may have been done or not: it had arrived, or may have, when the answer was lost."""

    def __init__(self, why: str) -> None:
        super().__init__("whether it was done is unknown", why, "look before you repeat it")


class CallRefused(Error):
    """The authority refuses the call, and nothing was written that the code doesn't imply."""

    def __init__(self, code: str, reason: str, why: str, next: str, facts: Mapping[str, JSON]) -> None:  # noqa: A002
        super().__init__(f"the authority refuses this: {code} ({reason})", why, next)
        self.code, self.reason, self.facts = code, reason, facts


class NotFound(CallRefused):
    """There is no such run or step."""


class NotAllowed(CallRefused):
    """The call needs a key, another key, or a key for this run."""


class Conflict(CallRefused):
    """Things aren't as the call assumes. Look again and decide anew."""


class RunFailed(Error):
    """A run ended without a result. `state` is how (failed, cancelled, superseded), `error` what it left behind."""

    def __init__(self, run_id: str, state: str, error: Any) -> None:
        super().__init__(f"run {run_id} is {state}", str(error) if error is not None else "")
        self.run_id, self.state, self.error = run_id, state, error


class NotYet(Error, TimeoutError):
    """A run has not ended in the time that was given. It goes on; `state` is where it stands."""

    def __init__(self, run_id: str, state: str) -> None:
        super().__init__(f"run {run_id} has not ended in time", f"it is {state}", "ask for its result again")
        self.run_id, self.state = run_id, state


class Fail(Exception):
    """Raised by an agent to end its run as failed, with the reason that people will read."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Refused(Exception):
    """Raised by a python tool: the effect definitely did not happen, and the answer is final.

    `body`, a JSON value, is stored as the refusal's body; without one, `why` is.
    """

    def __init__(self, why: str, body: JSON = None) -> None:
        super().__init__(why)
        self.why, self.body = why, body


class NotSent(Exception):
    """Raised by a python tool: the effect definitely did not happen, because nothing had left. It is tried again."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class Preempted(BaseException):
    """The lease is lost. Everything that this pass still tries would be refused; let the exception through.

    Nothing is booked as failed and no effect is lost: the next holder goes on from the journal. `facts` holds what the
    authority said: both epochs, the present holder, what ended the lease and when.
    """

    def __init__(self, run_id: str, epoch: int, why: str, facts: Mapping[str, JSON] | None = None) -> None:
        self.what = f"the lease on run {run_id} (epoch {epoch}) is lost"
        self.why, self.next = why, "let this exception through; the run's next holder goes on"
        super().__init__(_sentence(self.what, why, self.next))
        self.run_id, self.epoch, self.facts = run_id, epoch, dict(facts or {})


class PassEnded(BaseException):
    """This pass is over, though the run isn't. Let it through: the worker releases the lease with `reason`."""

    def __init__(self, run_id: str, reason: ReleaseReason, why: str, next: str = "") -> None:  # noqa: A002
        self.what = f"this pass of run {run_id} ends"
        self.why, self.next = why, next or "let this exception through; the worker releases the lease"
        super().__init__(_sentence(self.what, why, self.next))
        self.run_id, self.reason = run_id, reason
