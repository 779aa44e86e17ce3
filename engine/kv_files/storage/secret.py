"""Reads and makes a storage's secret, which is the key of the digests of all its files.

Whoever knows the key and can write the files can change the KV that the model reads.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from baton.api.errors import ConfigError
from baton.kv.block_key import KEY_BYTES
from engine.kv_files.storage.file_system import FileSystem

SECRET = "secret"
UNFINISHED = ".unfinished-"


def read_secret(path: Path, files: FileSystem, field: str = "kv_files") -> bytes:
    """Return the key in a file.

    Args:
        field: the option that names the file or its folder, for errors.

    Raises:
        ConfigError: the file has another length, belongs to another user, or is open to all.
        OSError: the file cannot be read.
    """
    descriptor = files.open(path)
    try:
        if not files.is_private(descriptor):
            raise ConfigError(
                f"{field}: {path}: belongs to another user, or is open to all users; whoever "
                "knows this key can change what the model reads"
            )
        found = bytearray(KEY_BYTES + 1)
        num_bytes = files.read_into(descriptor, 0, [memoryview(found)])
    finally:
        files.close(descriptor)
    if num_bytes != KEY_BYTES:
        has = f"{num_bytes} bytes" if num_bytes < KEY_BYTES else f"more than {KEY_BYTES} bytes"
        raise ConfigError(f"{field}: {path}: must have {KEY_BYTES} bytes, has {has}")
    return bytes(found[:num_bytes])


def read_secret_file(path: str, files: FileSystem) -> bytes:
    """Return the key in the file of ``--kv-files-secret``; raises ConfigError."""
    expanded = Path(path).expanduser().resolve()  # Kubernetes mounts secrets as links
    try:
        return read_secret(expanded, files, "kv_files_secret")
    except OSError as error:
        raise ConfigError(f"kv_files_secret: {expanded}: {error.strerror}") from error


def open_folder_secret(folder: Path, files: FileSystem, known: bytes = b"") -> bytes:
    """Return a folder's own key; write it if there is none. Raises ConfigError, OSError.

    Args:
        known: the key to write; empty: write a new key.
    """
    path = folder / SECRET
    try:
        return read_secret(path, files)  # reading still works if the disk is full
    except FileNotFoundError:
        _write_secret(path, files, known or os.urandom(KEY_BYTES))
    return read_secret(path, files)


def _write_secret(path: Path, files: FileSystem, key: bytes) -> None:
    new = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    try:
        files.write_new(new, [key])
        files.link(new, path)
    except FileExistsError:
        pass  # another node was faster
    finally:
        files.remove(new)
