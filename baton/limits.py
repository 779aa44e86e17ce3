"""Limits and figures that more than one room goes by, so that each is written once."""

from __future__ import annotations

# It goes to every node of the other role. Ours have a kilobyte; each network device adds some 100
# bytes, each registered memory some dozens.
MAX_PEER_INFO_BYTES = 2**17

# Parts in which the last chunk of a prompt is sent, layer-wise; routers reckon with it.
NUM_LAYER_GROUPS = 4
