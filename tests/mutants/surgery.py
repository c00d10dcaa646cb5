"""Changes one place of the product in memory, and puts it back.

A mutant is a text that stands once in a module's source, and another text in its place. The module's source is run anew
in its own namespace, and every module of the product that had imported an old function is given the new one.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import NamedTuple


class Mutant(NamedTuple):
    """One rule switched off: which law it serves, and where. `kills` names the rig and the seed that find it."""

    name: str
    law: str
    module: str
    old: str
    new: str
    rig: str
    seed: int


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The product with one place changed. Fails if the place isn't there: then the mutant has to follow the code."""
    module = importlib.import_module(f"tidefast.{mutant.module}")
    source = inspect.getsource(module)
    count = source.count(mutant.old)
    if count != 1:
        raise LookupError(f"{mutant.name}: its text stands {count} times in {mutant.module}, expected once")
    before = dict(vars(module))
    changed = compile(source.replace(mutant.old, mutant.new), f"<mutant {mutant.name}>", "exec")
    fresh: dict[str, object] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(changed, fresh)
    swaps = _swaps(module, before, fresh)
    try:
        _swap(swaps)
        yield
    finally:
        _swap({id(new): (new, old) for old, new in swaps.values()})
        vars(module).update(before)


def _swaps(module: ModuleType, before: dict[str, object], fresh: dict[str, object]) -> dict[int, tuple[object, object]]:
    """Old function → new one. Functions only: records and their classes must stay the same objects everywhere."""
    swaps: dict[int, tuple[object, object]] = {}
    for name, old in before.items():
        new = fresh.get(name)
        if isinstance(old, FunctionType) and isinstance(new, FunctionType) and old.__module__ == module.__name__:
            rebound = FunctionType(new.__code__, vars(module), new.__name__, new.__defaults__, new.__closure__)
            rebound.__kwdefaults__ = new.__kwdefaults__
            swaps[id(old)] = (old, rebound)
        elif isinstance(old, type) and isinstance(new, type) and old.__module__ == module.__name__:
            swaps.update(_method_swaps(module, old, new))
    return swaps


def _method_swaps(module: ModuleType, old: type, new: type) -> dict[int, tuple[object, object]]:
    """Methods and properties of a class that changed: the class stays, its members are exchanged."""
    found: dict[int, tuple[object, object]] = {}
    for name, member in vars(old).items():
        other = vars(new).get(name)
        if isinstance(member, FunctionType) and isinstance(other, FunctionType) and _differ(member, other):
            rebound = FunctionType(other.__code__, vars(module), name, other.__defaults__, member.__closure__)
            rebound.__kwdefaults__ = other.__kwdefaults__
            found[id(member)] = (Member(old, name, member), Member(old, name, rebound))
        if isinstance(member, property) and isinstance(other, property) and _differ(member.fget, other.fget):
            code = other.fget.__code__  # type: ignore[union-attr]
            rebound_property = property(FunctionType(code, vars(module), name))
            found[id(member)] = (Member(old, name, member), Member(old, name, rebound_property))
    return found


class Member(NamedTuple):
    """A class's member, to be set on the class itself."""

    owner: type
    name: str
    value: object


def _differ(old: object, new: object) -> bool:
    return old.__code__.co_code != new.__code__.co_code or old.__code__.co_consts != new.__code__.co_consts  # type: ignore[attr-defined]


def _swap(swaps: dict[int, tuple[object, object]]) -> None:
    for _, new in swaps.values():
        if isinstance(new, Member):
            setattr(new.owner, new.name, new.value)
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(("tidefast", "tests")):
            continue
        for attribute, value in list(vars(module).items()):
            swap = swaps.get(id(value))
            if swap is not None and value is swap[0]:
                setattr(module, attribute, swap[1])
