"""For users' own tests: one's own tool and agent under killed workers, frozen workers and lost answers.

    from tidefast.testing import Provider, every_point

Owns a bench that runs an app over the real engine, gateway and SDK in one process and in virtual time, a provider that
counts what it did, and a plan of faults. Must not know the laws: the auditor of `sim` judges, against the provider's
count. No name here is imported before it is used, because pytest loads the plugin in every session.
Start with `sweep.py` (`every_point`), then `bench.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidefast.engine.clock import ManualClock as ManualClock
    from tidefast.testing.bench import Bench as Bench
    from tidefast.testing.faults import Fault as Fault
    from tidefast.testing.faults import Faults as Faults
    from tidefast.testing.loop import Stuck as Stuck
    from tidefast.testing.provider import Effect as Effect
    from tidefast.testing.provider import Provider as Provider
    from tidefast.testing.provider import ProviderFailed as ProviderFailed
    from tidefast.testing.result import Result as Result
    from tidefast.testing.result import Unlawful as Unlawful
    from tidefast.testing.sweep import SweepReport as SweepReport
    from tidefast.testing.sweep import every_point as every_point

_HOMES = {
    "ManualClock": "tidefast.engine.clock",
    "Bench": "tidefast.testing.bench",
    "Fault": "tidefast.testing.faults",
    "Faults": "tidefast.testing.faults",
    "Stuck": "tidefast.testing.loop",
    "Effect": "tidefast.testing.provider",
    "Provider": "tidefast.testing.provider",
    "ProviderFailed": "tidefast.testing.provider",
    "Result": "tidefast.testing.result",
    "Unlawful": "tidefast.testing.result",
    "SweepReport": "tidefast.testing.sweep",
    "every_point": "tidefast.testing.sweep",
}
__all__ = [
    "Bench",
    "Effect",
    "Fault",
    "Faults",
    "ManualClock",
    "Provider",
    "ProviderFailed",
    "Result",
    "Stuck",
    "SweepReport",
    "Unlawful",
    "every_point",
]


def __getattr__(name: str) -> object:
    """A public name, imported when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidefast.testing' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
