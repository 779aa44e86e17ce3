"""A second rank with files of its own, which a thread of the test's process serves."""

from __future__ import annotations

from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

from engine.kv_files.rank_stores import RankScans, RankStores, _read, _serve, _write
from engine.kv_files.run_store import RunStore
from tests.fakes.engine.kv_file_stores import Blocks, open_store
from tests.fakes.engine.kv_file_systems import TroubledFiles


class TwoRanks:
    """The stores of a leader and of a second rank; a context manager that ends the second rank.

    Args:
        own: the leader's store.
        folder: folder of both ranks' files.
        may_scan: whether the second rank lists its files at once.

    Attributes:
        stores: the stores of both ranks, as the leader uses them.
        second: the second rank's own store.
        files: the second rank's file system, which can stand still.
        reader: the second rank's end of the connection for reads.
        may_scan: set while the second rank may list its files.
    """

    def __init__(self, own: RunStore, folder: Path, *, may_scan: bool = True) -> None:
        self.files = TroubledFiles()
        self.may_scan = Event()
        if may_scan:
            self.may_scan.set()
        memory = Blocks(block_bytes=own.memory.block_bytes)
        self.second, _ = open_store(folder, files=self.files, memory=memory)
        (mine, self.reader), (others, writer) = Pipe(), Pipe()
        self.stores = RankStores(own, 0, [mine], [others])
        self._links: list[Connection] = [mine, others]
        self._scans = RankScans(self.second)
        read = partial(_read, self._scans)
        self._threads = [
            Thread(target=_serve, args=(self.reader, self.second, 1, read)),
            Thread(target=_serve, args=(writer, self.second, 1, _write, self._scan)),
        ]
        for thread in self._threads:
            thread.start()

    def _scan(self) -> None:
        self.may_scan.wait()
        self._scans.scan()

    def __enter__(self) -> TwoRanks:
        return self

    def __exit__(self, *problem: object) -> None:
        self.files.gate.set()
        self.may_scan.set()
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()
