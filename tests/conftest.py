"""Settings for all tests.

Hypothesis gives the same examples on each run, fresh ones in `make deep`. A test may be a coroutine; each one gets an
event loop of its own.
"""

import asyncio
import inspect
import os

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("deep", deadline=None, database=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("TIDEFAST_HYPOTHESIS", "same"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
