"""The operator's key: made at first start beside the store, read by the CLI, compared by its digest only.

Worker and reader verbs are open on loopback; a verb that overrules a lease or settles a doubt needs this key, so that a
program that was merely led astray can't do it. The server holds the key's SHA-256, never the key.
"""

import hashlib
import hmac
from pathlib import Path

from tidefast.wire import secretfile

PREFIX = "tfo1."
_KEY_LENGTH_MAX = 256


def operator_key_path(store_file: Path) -> Path:
    """Where the operator's key of a store file stands."""
    return store_file.with_name(f"{store_file.name}.operator-key")


def secret_path(store_file: Path) -> Path:
    """Where the secret that signs the lease tokens of a store file stands."""
    return store_file.with_name(f"{store_file.name}.secret")


def make_operator_key(store_file: Path) -> str:
    """The operator's key of this store, made at first use. Raises `SecretRefused`."""
    return PREFIX + secretfile.read_or_make(operator_key_path(store_file)).hex()


def read_operator_key(store_file: Path) -> str | None:
    """The operator's key of this store, None if none was made. Raises `SecretRefused` for a file that can't be used."""
    try:
        return PREFIX + secretfile.read(operator_key_path(store_file)).hex()
    except FileNotFoundError:
        return None


def key_digest(key: str) -> bytes:
    """What the server keeps of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_key(authorization: str, digest: bytes) -> bool:
    """Whether an Authorization header carries the key with this digest; compared in constant time."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(key) <= _KEY_LENGTH_MAX:
        return False
    return hmac.compare_digest(key_digest(key), digest)
