"""What the server checks callers by: the keys it knows, and the secrets that sign lease tokens.

Both can be replaced while the server runs (SIGHUP reads the files again): a request is judged by what stood when it
came. Of several secrets the newest signs and all verify, so that a rotation drops no live lease.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tidefast.protocol.ids import RunId, WorkspaceId
from tidefast.protocol.records import ReplicaRight, Right
from tidefast.server import keys
from tidefast.server.access import KeyBook, key_digest
from tidefast.server.keyfile import read_keys
from tidefast.wire import secretfile, tokens


@dataclass(frozen=True, slots=True)
class Signer:
    """Mints and checks lease tokens; `secrets` are in order of age, the newest last, and appear in no text."""

    secrets: tuple[bytes, ...] = field(repr=False)
    namespace: bytes

    def mint(self, right: Right) -> str:
        return tokens.mint(self.secrets[-1], self.namespace, right)

    def verify(self, token: str) -> Right | None:
        for secret in reversed(self.secrets):
            right = tokens.verify(secret, self.namespace, token)
            if right is not None:
                return right
        return None

    def mint_replica(self, right: ReplicaRight, number: int) -> str:
        """The token of a replica's session; the workspace stands in the place of the run."""
        shown = Right(RunId(right.workspace_id), right.epoch, f"{right.boot_id}.{number}")
        return tokens.mint(self.secrets[-1], self.namespace, shown, tokens.REPLICA)

    def verify_replica(self, token: str) -> tuple[ReplicaRight, int] | None:
        """(the right, the session's number) that a token proves; None if it proves nothing."""
        for secret in reversed(self.secrets):
            shown = tokens.verify(secret, self.namespace, token, tokens.REPLICA)
            if shown is not None:
                boot_id, _, number = shown.holder.rpartition(".")
                return ReplicaRight(WorkspaceId(shown.run_id), shown.epoch, boot_id), int(number)
        return None


@dataclass(slots=True)
class Credentials:
    """What is in force now."""

    book: KeyBook
    signer: Signer

    def replace(self, fresh: "Credentials") -> None:
        """Judge by these from now on."""
        self.book, self.signer = fresh.book, fresh.signer


@dataclass(frozen=True, slots=True)
class Files:
    """Where the credentials stand. `keys` None: no key file, loopback only."""

    secret: Path
    operator_key: Path
    keys: Path | None = None

    def load(self, namespace: bytes) -> Credentials:
        """Read them all; secret and operator's key are made at first use. Raises `SecretRefused`, `KeysRefused`."""
        operator = keys.PREFIX + secretfile.read_or_make(self.operator_key).hex()
        signer = Signer(secretfile.read_all_or_make(self.secret), namespace)
        return Credentials(KeyBook(key_digest(operator), None if self.keys is None else read_keys(self.keys)), signer)
