"""FolderWatch: reports which folders were changed, so that no unchanged folder is listed.

Linux reports changes that processes of this machine make (inotify). On other systems, and once a
folder cannot be watched (watches per user are limited), the watch is off, and callers list all
folders.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

_CREATED, _DELETED, _MOVED_FROM, _MOVED_TO = 0x100, 0x200, 0x40, 0x80
_OVERFLOW, _GONE, _ONLY_FOLDERS = 0x4000, 0x8000, 0x0100_0000
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_EVENT = struct.Struct("iIII")  # watch, kind, cookie, length of the name that follows the event
_READ_BYTES = 2**16


class FolderWatch:
    """Watches folders for files and subfolders that appear or disappear. Used by one thread.

    Attributes:
        is_on: whether every change in the folders of `watch_folder` is reported.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._folders: dict[int, str] = {}  # names by number of the watch
        self._descriptor = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = self._libc.inotify_init1(_NONBLOCK_CLOEXEC)
        self.is_on = self._descriptor >= 0

    def watch_folder(self, path: Path, name: str) -> None:
        """Report changes in a folder under ``name`` from now on; do nothing if it is watched."""
        if not self.is_on:
            return
        kinds = _CREATED | _DELETED | _MOVED_FROM | _MOVED_TO | _ONLY_FOLDERS
        watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), kinds)
        if watch >= 0:
            self._folders[watch] = name
        elif path.is_dir():  # the system's limit of watches is reached
            self.close()

    def take_changed(self) -> set[str] | None:
        """Return the names of the folders that were changed since the last call.

        Returns None if any folder may have been changed.
        """
        changed: set[str] = set()
        while self.is_on:
            try:
                events = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return changed
            place = 0
            while place < len(events):
                watch, kind, _, length = _EVENT.unpack_from(events, place)
                place += _EVENT.size + length
                if kind & _OVERFLOW:
                    return None
                name = self._folders.get(watch)
                if kind & _GONE:
                    self._folders.pop(watch, None)
                elif name is not None:
                    changed.add(name)
        return None

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self.is_on = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()
