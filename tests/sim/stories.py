"""Runs that the real rules wrote, told in few words, and a player of random commands."""

from collections.abc import Callable

from tests.sim.books import BOOT, CHARGE, LEASE_MS, LOCAL, LOOK, PATIENT, ROUGH, TRIP, UUID, Books

from tidefast.protocol import commands as c
from tidefast.protocol.contracts import contract_digest
from tidefast.protocol.ids import StepId
from tidefast.protocol.verdicts import Refused

LEASE_OVER_MS = LEASE_MS + 1


def happy(books: Books) -> None:
    books.pay("pay")
    books.pay("look", LOOK)
    books.pay("uuid", UUID)
    books.pay("py", LOCAL)
    books.do(c.SaveResult(books.right, StepId("sum"), "7"))
    books.checkpoint(1)
    books.complete()


def lost_answer(books: Books) -> None:
    books.admit("pay")
    books.settle("pay", "doubted")
    books.admit("pay")
    books.settle("pay", attempt=2)
    books.settle("pay", attempt=1)
    books.complete()


def late_receipt_joined(books: Books) -> None:
    books.admit("pay")
    books.takeover()
    books.settle("pay")
    books.admit("pay")
    books.checkpoint(1)
    books.complete(asked=["pay"])


def refused(books: Books) -> None:
    books.admit("pay")
    books.settle("pay", "refused")
    books.admit("pay")
    books.admit("slow", PATIENT)
    books.settle("slow", "refused")
    books.admit("slow", PATIENT)
    books.settle("slow", "unsent", 2)
    books.takeover()
    books.admit("slow", PATIENT)
    books.settle("slow", "doubted", 3)
    books.ms += 5_000
    books.admit("slow", PATIENT)
    books.settle("slow", "refused", 4)
    books.complete(asked=["pay", "slow"])


def refused_replay(books: Books) -> None:
    books.admit("pay")
    books.settle("pay", "doubted")
    books.ms += 5_000
    books.admit("pay")
    books.settle("pay", "refused", 2)
    assert books.view.steps[StepId("pay")].state == "rejected"
    books.complete()


def refusal_without_status(books: Books) -> None:
    books.admit("pay")
    books.settle("pay", "refused", receipt='"declined"')
    books.admit("other")
    books.settle("other", "refused", receipt='{"encoding":"base64","status":402}')


def restated(books: Books) -> None:
    books.admit("pay")
    books.settle("pay", "unsent")
    books.takeover()
    books.admit("pay", args={"n": 2})
    books.settle("pay", attempt=2)
    moved = PATIENT._replace(url="https://other.example")
    books.admit("slow", PATIENT)
    books.settle("slow", "refused")
    books.view = books.view._replace(contracts={**books.view.contracts, contract_digest(moved): moved})
    books.admit("slow", moved)


def held(verdict: c.ResolveVerdict) -> Callable[[Books], None]:
    def story(books: Books) -> None:
        books.admit("mail", ROUGH)
        books.settle("mail", "doubted")
        books.admit("mail", ROUGH)
        books.admit("pay")
        books.do(c.Release(books.right, "held"))
        books.ms += 5_000
        books.resolve("mail", verdict)
        books.grant("w2")
        books.admit("mail", ROUGH)
        books.settle("mail", attempt=2)
        books.pay("pay")
        books.complete(asked=["mail"])

    return story


def compensated(books: Books) -> None:
    books.pay("pay")
    books.undo("pay")
    books.takeover()
    books.undo("pay")
    books.takeover("w3")
    books.settle("pay~undo", "applied", 1)
    books.undo("pay")
    books.undo("pay")
    assert books.view.steps[StepId("pay")].state == "compensated"
    books.complete(asked=["pay"])


def undo_refused(books: Books) -> None:
    books.pay("pay")
    books.undo("pay")
    books.settle("pay~undo", "refused")
    books.ms += 5_000
    books.resolve("pay~undo", "refused")
    books.checkpoint(1)
    books.complete()


def failing(books: Books) -> None:
    books.pay("pay")
    books.admit("mail")
    books.settle("mail", "unsent")
    books.admit("late")
    books.fail()
    books.takeover()
    books.admit("late")
    books.settle("late", attempt=2)
    books.fail("again")
    books.fail("again")
    assert books.view.run is not None and books.view.run.end == "failed"


def cancelled(books: Books) -> None:
    for step in ("flight", "hotel"):
        books.pay(step, TRIP)
    books.pay("pay")
    books.admit("car", TRIP)
    books.do(c.Pause(books.run_id, "anna"))
    books.do(c.Resume(books.run_id, "anna"))
    books.do(c.Freeze(books.run_id, "anna"))
    books.do(c.Pause(books.run_id, "anna"))
    books.do(c.Cancel(books.run_id, "anna", "not wanted"))
    books.settle("car")
    books.ms += 5_000
    books.grant("w2")
    books.admit("car", TRIP, stored=True)
    for step in ("car", "hotel"):
        books.undo(step)
        books.settle(f"{step}~undo")
    books.undo("flight", problem="its receipt has no id")
    books.resolve("flight~undo", "refused")
    books.fail("cancelled")
    assert books.view.run is not None and books.view.run.end == "cancelled"


def leases(books: Books) -> None:
    books.do(c.Release(books.right, "done"))
    books.do(c.Release(books.right, "done"))
    books.ms += 20
    books.grant("w2")
    books.ms += LEASE_OVER_MS
    books.do(c.Lapse(books.run_id))
    books.grant("w3", "one")
    books.grant("w3", "one")
    books.do(c.Renew(books.right))
    books.ms += LEASE_OVER_MS
    books.ms += LEASE_OVER_MS
    books.grant("w4")


def frozen(books: Books) -> None:
    books.do(c.Release(books.right, "drift", "other words"))
    books.grant("w2")
    books.do(c.Thaw(books.run_id, "anna"))
    for place in range(12):
        books.ms += 100_000
        books.grant(f"w{place}")
    assert books.view.run is not None and books.view.run.frozen == "no_progress"
    books.do(c.Thaw(books.run_id, "anna"))
    books.grant("w")


def diverged(books: Books) -> None:
    books.admit("mail", ROUGH)
    books.settle("mail", "doubted")
    books.ms += 5_000
    books.resolve("mail", "not_applied")
    books.settle("mail")
    assert books.view.run is not None and books.view.run.frozen == "diverged"
    books.admit("mail", ROUGH)
    books.resolve("mail", "applied")
    books.do(c.Thaw(books.run_id, "anna"))
    books.admit("mail", ROUGH)


def lost_by_sweep(books: Books) -> None:
    books.admit("pay")
    books.ms += 5_000
    books.do(c.MarkLost(books.run_id, StepId("pay")))
    books.settle("pay", "unsent")


STORIES: dict[str, Callable[[Books], None]] = {
    story.__name__: story
    for story in (
        happy,
        lost_answer,
        late_receipt_joined,
        refused,
        refused_replay,
        refusal_without_status,
        restated,
        compensated,
        undo_refused,
        failing,
        cancelled,
        leases,
        frozen,
        diverged,
        lost_by_sweep,
    )
}
for word in ("applied", "not_applied", "refused", "compensated"):
    STORIES[f"held_{word}"] = held(word)  # type: ignore[arg-type]


TOOLS = (CHARGE, PATIENT, ROUGH, LOOK)


def play(books: Books, moves: list[tuple[int, int, int, int]]) -> None:
    """Any verb with any right ever granted, at any time; refusals are part of it."""
    rights = [books.right]
    for verb, which, what, back in moves:
        name, tool = f"s{which}", TOOLS[which]
        step = books.view.steps.get(StepId(name))
        attempts = 0 if step is None else len(step.attempts)
        books.ms += (0, 1, 500, 3_000, 12_000, 70_000)[what]
        right = rights[what % len(rights)] if verb % 2 else rights[-1]
        match verb:
            case 0 | 1 | 2:
                books.admit(name, tool, right=right, stored=what == 5)
            case 3 | 4 | 5 | 6:
                outcomes: tuple[c.OutcomeKind, ...] = ("applied", "doubted", "refused", "unsent", "unlisted")
                books.settle(name, outcomes[what % 5], attempts - back)
            case 7 | 8:
                books.preempt()
                books.ms += what * 400
                if not isinstance(books.grant(f"w{len(rights)}"), Refused):
                    rights.append(books.right)
            case 9:
                books.checkpoint(what, right)
            case 10:
                books.right = right
                books.undo(name)
                books.settle(name + "~undo", ("applied", "doubted", "refused", "unsent")[what % 4], 1)
            case 11:
                verdicts: tuple[c.ResolveVerdict, ...] = ("applied", "not_applied", "refused", "compensated")
                resolve(books, name + ("~undo" if what == 5 else ""), verdicts[what % 4])
            case 12:
                books.do(c.Thaw(books.run_id, "anna"))
            case 13:
                books.do(c.MarkLost(books.run_id, StepId(name)))
                books.do(c.Lapse(books.run_id))
            case 14:
                books.view = books.view._replace(instances=frozenset((BOOT,)) if what % 2 else frozenset())
                books.do(c.SaveResult(right, StepId("local"), "1"))
            case _:
                books.right = right
                if what == 0:
                    books.complete(asked=["s0", "s1", "s2", "s3"])
                elif what == 1:
                    books.fail()
        books.right = rights[-1]


def resolve(books: Books, name: str, verdict: c.ResolveVerdict) -> None:
    """Nobody says *applied* of a rejected step."""
    step = books.view.steps.get(StepId(name))
    if verdict != "applied" or step is None or step.state != "rejected":
        books.resolve(name, verdict)
