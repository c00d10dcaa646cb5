"""`budgets`: what models have cost by run, agent and key, and the word that raises a limit."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.desk import must, reading, writing
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, OperatorKey, StoreName, Url
from tidefast.protocol.answers import BudgetInfo
from tidefast.protocol.budget import Limit
from tidefast.wire.answers import spell

MICROS = 1_000_000
PAGE = 1_000


def budgets(
    name: str | None = None,
    /,
    *,
    calls: Annotated[int | None, Parameter(help="Set the limit of calls.")] = None,
    tokens: Annotated[int | None, Parameter(help="Set the limit of tokens.")] = None,
    money: Annotated[Decimal | None, Parameter(help="Set the limit of money, in the price table's unit.")] = None,
    note: Annotated[str, Parameter(help="Why the limit is set; it is kept with the budget.")] = "",
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """List budgets: what is spent, reserved, and allowed. With a NAME and a limit: set that limit.

    Names are run/RUN, agent/AGENT and key/KEY. A limit that is set here stands above the configured one; zero is zero.
    """
    limit = Limit(calls, tokens, None if money is None else int(money * MICROS))
    if any(most is not None and most < 0 for most in limit):
        raise CliError("usage", "a limit below zero", "zero is the least that a limit can be", ExitCode.USAGE)
    if limit == Limit():
        found = asyncio.run(_list(name, url, store))
    elif name is None:
        raise CliError(
            "usage", "a limit without a name", "name the budget: run/RUN, agent/AGENT or key/KEY", ExitCode.USAGE
        )
    else:
        found = [asyncio.run(_raise(name, limit, note, url, store, operator_key))]
    if as_json:
        out.document({"budgets": [spell(info) for info in found]})
        return ExitCode.OK
    for info in found:
        out.line((info.name, "bold"), f"  {_figures(info)}{f'  ({info.note})' if info.note else ''}")
    if not found:
        out.line("nothing was spent" if name is None else f"nothing was spent in {name}")
    return ExitCode.OK


async def _list(name: str | None, url: str | None, store: str) -> list[BudgetInfo]:
    found: list[BudgetInfo] = []
    async with reading(url, store) as desk:
        while page := await desk.budgets(found[-1].name if found else "", PAGE):
            found += page
    return [info for info in found if name in (None, info.name)]


async def _raise(
    name: str, limit: Limit, note: str, url: str | None, store: str, operator_key: Path | None
) -> BudgetInfo:
    async with writing(url, store, operator_key) as desk:
        return must(await desk.raise_budget(name, limit, note))


def _figures(info: BudgetInfo) -> str:
    """`3 of 5 calls, 1,200 tokens, 0.42 of 1 money (0.1 estimated, 0.2 reserved)`"""
    parts = [
        _figure("calls", 1, info.spent_calls, info.estimated_calls, info.reserved_calls, info.limit_calls),
        _figure("tokens", 1, info.spent_tokens, info.estimated_tokens, info.reserved_tokens, info.limit_tokens),
        _figure("money", MICROS, info.spent_micros, info.estimated_micros, info.reserved_micros, info.limit_micros),
    ]
    return ", ".join(part for part in parts if part)


def _figure(unit: str, scale: int, spent: int, estimated: int, reserved: int, limit: int | None) -> str:
    def told(amount: int) -> str:
        return f"{amount:,}" if scale == 1 else f"{Decimal(amount) / scale:f}"

    if unit == "money" and not (spent or reserved) and limit is None:
        return ""
    more = [f"{told(amount)} {word}" for amount, word in ((estimated, "estimated"), (reserved, "reserved")) if amount]
    most = "" if limit is None else f" of {told(limit)}"
    return f"{told(spent)}{most} {unit}" + (f" ({', '.join(more)})" if more else "")
