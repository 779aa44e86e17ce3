"""Where runs of KV blocks are stored: a folder, or objects of an S3 server.

To add a storage, add a file that implements `Storage`, and a line here.
"""

from collections.abc import Callable

from baton.registry import Registry
from engine.kv_files.storage.storage import Storage, StorageTerms

# By scheme of the location; a location without a scheme is a folder.
STORAGES: Registry[Callable[[StorageTerms], Storage]] = Registry(
    "storage of KV",
    {
        "": "engine.kv_files.storage.folder:FolderStorage",
        "s3": "engine.kv_files.storage.objects:ObjectStorage",
    },
)
