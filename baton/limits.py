"""Limits and other numbers that several packages share."""

from __future__ import annotations

from baton.api.errors import ConfigError

# Maximum number of bytes of a node's peer info, which every node of the other role gets. Usually it
# has a kilobyte: about 100 bytes per network device, and a few dozen bytes per registered memory
# region.
MAX_PEER_INFO_BYTES = 2**17

# Number of parts in which the KV of a prompt's last chunk is sent. Routers use it in estimates.
NUM_LAYER_GROUPS = 4

MAX_REVISION_CHARS = 128
REVISION_HELP = (
    "Revision of the fleet's nodes that this node belongs to. Only nodes of one revision are "
    "paired, and requests go to revisions that have nodes of both roles (docs/rollout.md)."
)


def parse_revision(name: str, text: str) -> str:
    """Return the name of a revision unchanged; raises ConfigError if it is invalid."""
    if len(text) > MAX_REVISION_CHARS or not (text.isprintable() or not text):
        raise ConfigError(
            f"{name}: must have at most {MAX_REVISION_CHARS} printable characters, got {len(text)}"
        )
    return text
