"""`pytest tests/scenarios --rewrite` writes the traces and the docs' list anew; the diff is then read by a person."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the scenarios' traces and docs/scenarios.md anew")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite", default=False))
