"""Limits that more than one room checks, so that each is written once."""

from __future__ import annotations

# It goes to every node of the other role. Ours have a kilobyte; each network device adds some 100
# bytes, each registered memory some dozens.
MAX_PEER_INFO_BYTES = 2**17
