"""Apps for the tests of the testing room: a good one, and one for each way to be bad."""

import uuid
from collections.abc import Mapping
from typing import Any

import tidefast as tf
from tidefast.testing import Provider


def good(bank: Provider) -> tf.App:
    app = tf.App()

    @app.tool(key_ttl="24h", undo={"tool": "refund", "args": {"charge": "{receipt.body.id}"}})
    def charge(order: str, key: str) -> Any:
        return bank.call("charge", key=key, order=order)

    @app.tool(key_ttl="24h")
    async def refund(charge: str, key: str) -> Any:
        return await bank.call_async("refund", key=key, charge=charge)

    @app.tool
    def mail(to: str) -> Any:
        return bank.call("mail", to=to)

    @app.agent
    async def buy(run: tf.Run, ticket: Mapping[str, Any]) -> Any:
        paid = await run.tool("pay", "charge", order=ticket["order"])
        await run.checkpoint({"paid": True})
        return paid["id"]

    @app.agent
    async def regret(run: tf.Run, ticket: Mapping[str, Any]) -> str:
        await run.tool("pay", "charge", order=ticket["order"])
        await run.compensate("pay")
        return "undone"

    @app.agent
    async def tell(run: tf.Run, to: str) -> str:
        await run.tool("tell", "mail", to=to)
        return "told"

    @app.agent
    async def decline(run: tf.Run, ticket: Mapping[str, Any]) -> str:
        try:
            await run.tool("pay", "charge", order=ticket["order"])
        except tf.Rejected as rejected:
            raise tf.Fail(f"no money: {rejected.body}") from rejected
        return "paid"

    return app


def new_key_each_time(bank: Provider) -> tf.App:
    app = tf.App()

    @app.tool(key_ttl="24h")
    def charge(order: str, key: str) -> Any:
        return bank.call("charge", key=uuid.uuid4().hex, order=order)

    @app.agent
    async def buy(run: tf.Run, ticket: Mapping[str, Any]) -> Any:
        return await run.tool("pay", "charge", order=ticket["order"])

    return app


def mails_outside(bank: Provider) -> tf.App:
    app = good(bank)

    @app.agent
    async def chatty(run: tf.Run, ticket: Mapping[str, Any]) -> Any:
        paid = await run.tool("pay", "charge", order=ticket["order"])
        bank.call("mail", to="customer")
        return paid

    return app


def calls_a_failure_a_refusal(bank: Provider) -> tf.App:
    """Says *definitely not done* of an error that leaves it open."""
    app = tf.App()

    @app.tool(key_ttl="24h")
    def charge(order: str, key: str) -> Any:
        try:
            return bank.call("charge", key=key, order=order)
        except Exception as error:
            raise tf.Refused("it failed") from error

    @app.agent
    async def buy(run: tf.Run, ticket: Mapping[str, Any]) -> Any:
        return await run.tool("pay", "charge", order=ticket["order"])

    return app


def depends_on_chance(bank: Provider) -> tf.App:
    app = good(bank)

    @app.agent
    async def dice(run: tf.Run, ticket: Mapping[str, Any]) -> Any:
        return await run.tool("pay", "charge", order=uuid.uuid4().hex)

    return app
