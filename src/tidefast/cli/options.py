"""The options that several commands share, and the forms in which values are written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidefast.cli.errors import CliError, ExitCode
from tidefast.protocol.fields import duration_ms

DEFAULT_STORE = ".tidefast/store.db"


def _duration(kind: Any, tokens: Sequence[Any]) -> int:
    length = duration_ms(tokens[0].value)
    if length is None:
        raise ValueError(f'expected a duration like "30s", "5m" or "500ms", found {tokens[0].value!r}')
    return length


Url = Annotated[str | None, Parameter(name="--url", help="The server to ask (or TIDEFAST_URL): http://HOST:PORT.")]
StoreName = Annotated[
    str, Parameter(name="--store", help="The store's file, FILE or sqlite:///FILE, where no server is named.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON, for programs.")]
OperatorKey = Annotated[
    Path | None,
    Parameter(name="--operator-key", help="The file with the operator's key; by default the one beside the store."),
]
DurationMs = Annotated[int, Parameter(converter=_duration, n_tokens=1)]
Looked = Annotated[
    int | None,
    Parameter(
        converter=_duration,
        n_tokens=1,
        help="How long ago you looked at the provider, like 0s or 5m; needed for every verdict but applied.",
    ),
]
Models = Annotated[Path | None, Parameter(name="--models", help="The models and their budgets, a TOML file.")]
Tools = Annotated[Path | None, Parameter(name="--tools", help="The contracts of tools, a TOML file.")]


def json_text(text: str, what: str) -> str:
    """The canonical text of JSON that was given on the command line, or of a file's (`@FILE`). Raises `CliError`."""
    import msgspec

    from tidefast.protocol.canonical import CanonicalError, canonical

    source = what
    if text.startswith("@"):
        source = f"{what} {text}"
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CliError("usage", f"{source}: {error}", "name a readable file", ExitCode.USAGE) from error
    try:
        return canonical(msgspec.json.decode(text))
    except (msgspec.DecodeError, CanonicalError, UnicodeError, RecursionError) as error:
        todo = "write JSON, such as '{\"order\": 7}' or '\"text\"', or @FILE"
        raise CliError("usage", f"{source} is not JSON: {error}", todo, ExitCode.USAGE) from error


def checked_id(text: str, what: str, *, derived: bool = False) -> str:
    """A name in the form that ids have. Raises `CliError`."""
    from tidefast.protocol.ids import is_derived_id, is_id

    if is_id(text) or (derived and is_derived_id(text)):
        return text
    todo = "ids are 1 to 128 of A-Z a-z 0-9 . _ -, and don't begin with . or -"
    raise CliError("usage", f"{what} {text[:200]!r} is no id", todo, ExitCode.USAGE)
