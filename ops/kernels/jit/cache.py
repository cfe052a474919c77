"""Compiled kernels on disk: one file each, which only the owner of the process may have written.

A cubin can read and write all of a process's memory on a GPU. A folder or file that another user could have written is
therefore not used. A file holds a magic line, a SHA-256 of its key and the cubin, and the cubin itself: nothing that a
CPU would run.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_MAGIC = b"fusible kernel 1\n"
_DIGEST_BYTES = 32
_UNFINISHED = ".new-"  # begins the names of files that are being written
_log = logging.getLogger("fusible")


class KernelCache:
    """Cubins by a key of everything that they depend on. A cache that cannot be used is always empty.

    Attributes:
        refusal: the reason why it is not used, or None.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.refusal = folder, _refusal_of(folder)
        if self.refusal is not None:
            _log.warning("kernels are not kept on disk: %s %s", folder, self.refusal)

    def find(self, key: str, compile_kernel: Callable[[], bytes]) -> bytes:
        """The cubin of a key; compiled and stored if it is missing. One process compiles while others wait."""
        kept = self.read(key)
        if kept is not None:
            return kept
        with self._turn(key):
            kept = self.read(key)
            if kept is None:
                kept = compile_kernel()
                self.write(key, kept)
        return kept

    def clear(self) -> int:
        """Removes all kernels, and temporary files of killed writers; returns the number of kernels."""
        removed = 0
        for path in self._kernels():
            path.unlink(missing_ok=True)
            removed += 1
        for path in self.folder.glob(f"{_UNFINISHED}*") if self.refusal is None else ():
            path.unlink(missing_ok=True)
        return removed

    def sizes(self) -> list[int]:
        """The bytes of every kernel."""
        return [path.stat().st_size for path in self._kernels()]

    def _kernels(self) -> list[Path]:
        return [] if self.refusal is not None else sorted(self.folder.glob("*.cubin"))

    def read(self, key: str) -> bytes | None:
        """The bytes that are stored under a key; None if there are none, or they may not be trusted."""
        if self.refusal is not None:
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(os.open(self.folder / f"{key}.cubin", flags), "rb") as file:
                content = b"" if _distrust(os.fstat(file.fileno()), stat.S_ISREG) else file.read()
        except OSError:
            return None
        start = len(_MAGIC) + _DIGEST_BYTES
        return content[start:] if content[:start] == _head(key, content[start:]) else None

    def write(self, key: str, cubin: bytes) -> None:
        """Stores a cubin, or other data, completely or not at all. A full disk is not an error."""
        if self.refusal is not None:
            return
        name = None
        try:
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=_UNFINISHED)
            with open(handle, "wb") as file:
                file.write(_head(key, cubin) + cubin)
            os.replace(name, self.folder / f"{key}.cubin")
        except OSError as error:
            _log.warning("a kernel is not kept on disk: %s", error)
            if name is not None:
                with suppress(OSError):
                    os.unlink(name)

    @contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        """Excludes other processes, where the file system can lock."""
        if self.refusal is not None:
            yield
            return
        handle = None
        with suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self.folder / f"{key[:2]}.lock", flags, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)


@cache
def kernel_cache() -> KernelCache:
    """The cache of this process: ``FUSIBLE_CACHE_DIR``, else ``fusible`` in the user's cache folder."""
    chosen = os.environ.get("FUSIBLE_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return KernelCache(Path(chosen) if chosen else Path(home) / "fusible")


def key_of(*parts: object) -> str:
    """The key of a kernel that depends on the texts of these parts."""
    return hashlib.sha256(repr((_MAGIC, parts)).encode()).hexdigest()


def _head(key: str, cubin: bytes) -> bytes:
    """The head of a file. Its digest covers the key, so that a file under another key's name is rejected."""
    return _MAGIC + hashlib.sha256(key.encode() + cubin).digest()


def _refusal_of(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _distrust(os.lstat(folder), stat.S_ISDIR)
    except OSError as error:
        return f"cannot be used: {error.strerror}"


def _distrust(status: os.stat_result, is_kind: Callable[[int], bool]) -> str | None:
    """The reason why a file or folder is not used; None if only the owner of this process can have written it."""
    if not is_kind(status.st_mode):
        return "is a link or another kind of file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return "can be written by others" if status.st_mode & 0o022 else None
