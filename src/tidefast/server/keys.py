"""The operator's key: made at first start beside the store, read by the CLI, known to the server by its digest only.

Without a key file worker and reader verbs are open on loopback; a verb that overrules a lease or settles a doubt needs
this key all the same, so that a program that was merely led astray can't do it. With one, this key is the operator's of
the host. The server holds the key's SHA-256, never the key.
"""

from pathlib import Path

from tidefast.wire import secretfile

PREFIX = "tfo1."


def notify_secret_path(store: Path) -> Path:
    """Where the secret that signs notices stands, unless it is said otherwise."""
    return store.with_name(f"{store.name}.notify-secret")


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
