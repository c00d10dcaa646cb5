"""Requests drawn from the server's own description: none is answered with a fault, and each refusal is a problem."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.server.support import TOKEN, Spy, app_of

from tidefast.protocol.verdicts import Refused
from tidefast.server.openapi import document


class Anything(Spy):
    """Refuses what it doesn't know; nothing is there."""

    def __getattr__(self, name: str) -> Any:
        if name in self._answers:
            return super().__getattr__(name)

        async def verb(*args: Any) -> Refused:
            return Refused("not_found", "run_unknown", {"run": "r1"})

        return verb


HEADERS = {"Host": "localhost", "Tidefast-Lease": TOKEN}
SCHEMA = schemathesis.openapi.from_dict(document())
SCHEMA.app = app_of(Anything())
STREAMS = "POST /v1/chat/completions"  # asks for a relay of the authority, which nobody stands in for here
OPERATIONS = [found for found in (made.ok() for made in SCHEMA.get_all_operations()) if found.label != STREAMS]


@pytest.mark.rig
@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_no_request_of_the_description_is_a_fault(operation: schemathesis.schemas.APIOperation) -> None:
    @settings(
        max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        answer = case.call(headers=HEADERS)
        assert answer.status_code < 500, (case, answer.content)
        if answer.status_code >= 400:
            assert answer.headers["content-type"][0] == "application/problem+json"

    check()
