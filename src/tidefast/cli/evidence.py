"""Commands that make and judge evidence: signed anchors of a store, and runs that are exported with their proof.

They only read a store, so a server may own it meanwhile. A key file that others can read is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName, checked_id
from tidefast.cli.place import store_path

if TYPE_CHECKING:
    from tidefast.sim.anchor import Anchor

KeyFile = Annotated[Path | None, Parameter(name="--key", help="The private key, a file that only you can read.")]
OutFile = Annotated[
    Path | None, Parameter(name="--out", help="The file to write; one that is there is never replaced.")
]
UNPINNED = "you named no key, so this shows that the file is whole, not whose word it is"


@contextmanager
def refusals(code: str) -> Iterator[None]:
    """Evidence that can't be used, as a line on stderr."""
    from tidefast.sim.anchor import EvidenceRefused

    try:
        yield
    except EvidenceRefused as error:
        what, _, todo = str(error).rpartition("; ")
        raise CliError(code, what or todo, todo if what else "", ExitCode.CONFIG) from error


def _needed(value: Path | None, name: str, usage: str) -> Path:
    if value is None:
        raise CliError("usage", f"{name} is missing", usage, ExitCode.USAGE)
    return value


def anchor(
    action: Annotated[Literal["keygen"] | None, Parameter(help="keygen: make a key instead.")] = None,
    /,
    *,
    store: StoreName = DEFAULT_STORE,
    key: KeyFile = None,
    out_file: OutFile = None,
    as_json: AsJson = False,
) -> int:
    """Sign run, length and last digest of every log, and write that to a file to be kept where the store is not.

    tidefast anchor keygen --key FILE makes a key: FILE (only you can read it) and FILE.pub. Whoever can write both the
    store and the anchors, or can read the key, can forge both.
    """
    usage = "tidefast anchor keygen --key FILE" if action else "tidefast anchor --store FILE --key FILE --out FILE"
    key_file = _needed(key, "--key", usage)
    from tidefast.sim import anchor as anchors

    if action == "keygen":
        with refusals("key_refused"):
            name = anchors.make_key(key_file)
        public = anchors.public_path(key_file)
        if as_json:
            out.document({"key": str(key_file), "public": str(public), "fingerprint": name})
        else:
            out.line(f"key {key_file}, public key {public}")
            out.line(f"fingerprint {name}")
        return ExitCode.OK
    path = _needed(out_file, "--out", usage)
    with refusals("key_refused"):
        signing = anchors.read_key(key_file)
    with _reading(store) as opened, refusals("anchor_refused"):
        runs, name = anchors.write_anchor(opened, path, signing)
    if as_json:
        out.document({"anchor": str(path), "runs": runs, "fingerprint": name})
    else:
        out.line(f"anchor {path}: {runs:,} runs, signed by {name}")
    return ExitCode.OK


@contextmanager
def _reading(store: str) -> Iterator[Any]:
    from tidefast.stores.sqlite import SqliteStore

    opened = SqliteStore.open_read_only(store_path(store))
    try:
        yield opened
    finally:
        opened.close()


def read_anchors(files: Sequence[Path], pin: str | None) -> "list[Anchor]":
    """The anchors that `audit` compares with, not read yet. Raises `CliError`."""
    if not files:
        if pin is not None:
            raise CliError("usage", "--anchor-key is for --anchor", "name an anchor", ExitCode.USAGE)
        return []
    from tidefast.sim.anchor import Anchor, read_pin

    with refusals("key_refused"):
        name = "" if pin is None else read_pin(pin)
    return [Anchor(file, name) for file in files]


def told_anchors(anchors: "Sequence[Anchor]") -> tuple[str, dict[str, Any]]:
    """(rows for people, members for programs): which anchors were compared, and what trust that gives."""
    rows, found = "", []
    for each in anchors:
        if each.seal is None:
            continue
        trust = "the key that you named" if each.seal.is_pinned else UNPINNED
        rows += (
            f"anchor {each.path} of {out.moment(each.at_ms)}: {each.runs:,} runs, signed by {each.seal.key}: {trust}\n"
        )
        found.append(
            {
                "file": str(each.path),
                "at_ms": each.at_ms,
                "runs": each.runs,
                "fingerprint": each.seal.key,
                "pinned": each.seal.is_pinned,
            }
        )
    return rows, {"anchors": found} if found else {}


def not_checked(anchors: "Sequence[Anchor]", *, has_ledger: bool) -> dict[str, str]:
    """What an audit of these can't say, so that nobody takes its silence for an answer: a word for each, a sentence."""
    left: dict[str, str] = {}
    if not has_ledger:
        left["ledger"] = "what providers really did; only their own record, named with --ledger, can say that"
    if not anchors:
        left["anchor"] = "whether whole logs were rewritten, cut or put back; only an earlier --anchor can say that"
    elif not all(each.seal is not None and each.seal.is_pinned for each in anchors):
        left["anchor_key"] = "whose word the anchor is; whoever wrote the store may have written it too (--anchor-key)"
    return left


def export(
    run: str,
    /,
    *,
    out_file: OutFile = None,
    key: KeyFile = None,
    store: StoreName = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Write one run's log, with the contracts that it names, to a file that tidefast verify judges without a store.

    It holds the run's bodies as they are stored. Without --key anybody can write such a file anew.
    """
    name = checked_id(run, "RUN")
    path = _needed(out_file, "--out", "tidefast export RUN --out FILE [--key FILE]")
    from tidefast.protocol.ids import RunId
    from tidefast.sim.anchor import fingerprint, read_key
    from tidefast.sim.export import export_run

    with refusals("key_refused"):
        signing = None if key is None else read_key(key)
    with _reading(store) as opened, refusals("export_refused"):
        events = export_run(opened, RunId(name), path, signing)
    signer = "" if signing is None else fingerprint(signing.public_key())
    if as_json:
        out.document({"export": str(path), "run": name, "events": events, "fingerprint": signer})
    else:
        out.line(
            f"export {path}: run {name}, {events:,} events, " + (f"signed by {signer}" if signer else "not signed")
        )
    return ExitCode.OK


def verify(
    file: Path,
    /,
    *,
    pub: Annotated[
        str | None, Parameter(help="The public key that must have signed it: its file, or SHA256:FINGERPRINT.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Judge an exported run by its chain, its signature and the laws. The exit code is 0 only if all hold."""
    from tidefast.sim.anchor import read_pin
    from tidefast.sim.export import verify as judge
    from tidefast.sim.report import sentence

    with refusals("key_refused"):
        pin = "" if pub is None else read_pin(pub)
    with refusals("export_refused"):
        found = judge(file, pin)
    seal = found.seal
    if as_json:
        out.document(
            {
                "run": found.run_id,
                "events": found.report.events,
                "fingerprint": "" if seal is None else seal.key,
                "pinned": seal is not None and seal.is_pinned,
                "refused": found.refused,
                "violations": found.report.counts,
                "ok": found.is_ok,
            }
        )
        return ExitCode.OK if found.is_ok else ExitCode.OTHER
    out.line(f"run {found.run_id}, exported {out.moment(found.at_ms)}: {found.report.events:,} events")
    if seal is None:
        out.line(found.refused)
    elif not seal.key:
        out.line("not signed: this shows that the file is whole, not whose word it is")
    else:
        out.line(f"signed by {seal.key}: " + ("the key that you named" if seal.is_pinned else UNPINNED))
    for violation in found.report.violations:
        out.line(sentence(violation))
    out.line("ok: the chain is whole and no law was broken" if found.is_ok else "NOT OK")
    return ExitCode.OK if found.is_ok else ExitCode.OTHER
