"""A second rank with files of its own, which a thread of the test's process serves."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from engine.kv_files.rank_stores import RankStores, _read, _serve, _write
from engine.kv_files.run_store import RunStore
from tests.fakes.engine.kv_file_stores import Blocks, open_store
from tests.fakes.engine.kv_file_systems import TroubledFiles


class TwoRanks:
    """The stores of a leader and of a second rank; a context manager that ends the second rank.

    Args:
        own: the leader's store.
        folder: folder of both ranks' files.

    Attributes:
        stores: the stores of both ranks, as the leader uses them.
        second: the second rank's own store.
        files: the second rank's file system, which can stand still.
        reader: the second rank's end of the connection for reads.
    """

    def __init__(self, own: RunStore, folder: Path) -> None:
        self.files = TroubledFiles()
        memory = Blocks(block_bytes=own.memory.block_bytes)
        self.second, _ = open_store(folder, files=self.files, memory=memory)
        (mine, self.reader), (others, writer) = Pipe(), Pipe()
        self.stores = RankStores(own, 0, [mine], [others])
        self._links: list[Connection] = [mine, others]
        self._threads = [
            Thread(target=_serve, args=(self.reader, self.second, 1, _read)),
            Thread(target=_serve, args=(writer, self.second, 1, _write)),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> TwoRanks:
        return self

    def __exit__(self, *problem: object) -> None:
        self.files.gate.set()
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()
