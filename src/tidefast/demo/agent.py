"""The agent of the refund desk: one run per ticket.

It asks a model which tool to call, refunds at the card provider, tells the customer by mail, leaves a note and a
checkpoint. It holds no key, no credential and no retry: where it is killed, the next worker runs this function again
from the top, and each finished step is answered from the journal.
"""

from dataclasses import dataclass
from typing import Any

import tidefast as tf

app = tf.App()
MODEL = "desk-model"  # what the models' file of the desk calls it, whichever model serves it

REASONS = {
    "card_declined": "the bank refuses refunds to this card",
    "charge_already_refunded": "this order was refunded before",
    "amount_too_large": "more was asked for than is left on the order",
}


@dataclass(frozen=True)
class Ticket:
    """What a customer asks for. No amount means all that is left on the order."""

    ticket: str
    order: str
    customer: str
    email: str
    reason: str
    ask_cents: int | None
    currency: str


def decide(ticket: Ticket) -> dict[str, Any]:
    """The call that this ticket asks for: what the model's choice is held against, and made without one."""
    call: dict[str, Any] = {"order": ticket.order, "currency": ticket.currency}
    if ticket.ask_cents is not None:
        call["cents"] = ticket.ask_cents
    return call


def question(ticket: Ticket) -> dict[str, Any]:
    """What the model is asked. The schema leaves it the tool's choice and the words of the note; nothing else."""
    chosen = {
        "tool": {"enum": ["refund"]},
        "order": {"const": ticket.order},
        "note": {"type": "string", "maxLength": 60},
    }
    schema = {"type": "object", "properties": chosen, "required": list(chosen), "additionalProperties": False}
    task = "You work at a refund desk. Choose the tool for the ticket and say why in a few words. Answer in JSON."
    told = f"Order {ticket.order}, {ticket.currency}. The customer writes: {ticket.reason[:200]}"
    return {
        "messages": [{"role": "system", "content": task}, {"role": "user", "content": told}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}},
        "max_tokens": 96,
    }


async def choose(run: tf.Run, ticket: Ticket) -> tuple[dict[str, Any], str]:
    """(the call to make, the model's note). A model that can't be used costs its note, never the refund."""
    call = decide(ticket)
    try:
        answer = await run.model("decide", model=MODEL, stream=True, **question(ticket))
        chosen = answer.json()
    except tf.Error as error:
        return call, f"without a model: {error.what}"
    if not isinstance(chosen, dict) or (chosen.get("tool"), chosen.get("order")) != ("refund", ticket.order):
        return call, "the model chose what this desk can't do"
    return call, str(chosen.get("note", ""))[:60]


def refusal(receipt: Any) -> str:
    """The provider's reason, in words for a customer."""
    body = receipt.get("body") if isinstance(receipt, dict) else None
    error = body.get("error") if isinstance(body, dict) else None
    code = str(error.get("code", "unknown")) if isinstance(error, dict) else "unknown"
    return REASONS.get(code, code)


def letter(ticket: Ticket, refund: dict[str, Any] | None, reason: str) -> dict[str, str]:
    """The mail to the customer, as the mail tool wants it."""
    if refund is None:
        text = f"Dear {ticket.customer},\n\nwe could not refund order {ticket.order}: {reason}.\n"
        return {"to": ticket.email, "subject": f"Your refund for {ticket.order} was not possible", "text": text}
    amount = f"{refund['cents'] / 100:.2f} {refund['currency']}"
    text = f"Dear {ticket.customer},\n\n{amount} for order {ticket.order} are on their way to your card.\n"
    return {"to": ticket.email, "subject": f"Your refund for {ticket.order}", "text": text}


def note(ticket: Ticket, outcome: str, why: str) -> str:
    """What the next colleague should know."""
    return f"{ticket.ticket}, order {ticket.order}: {outcome}; the customer was told ({why})"


@app.agent(name="refund-desk", version="1")
async def refund_desk(run: tf.Run, ticket: Ticket) -> dict[str, Any]:
    """Decide, refund, tell the customer, note, checkpoint."""
    call, why = await choose(run, ticket)
    refund: dict[str, Any] | None = None
    try:
        refund = await run.tool("refund", "refund", **call)
        reason, outcome = "", "refunded"
    except tf.Rejected as rejected:
        reason = refusal(rejected.receipt)
        outcome = f"refused: {reason}"
    await run.tool("mail", "send_mail", **letter(ticket, refund, reason))
    noted = await run.step("note", note, ticket, outcome, why)
    result = {"outcome": outcome, "cents": refund["cents"] if refund else 0, "currency": ticket.currency, "note": noted}
    await run.checkpoint(result)
    return result
