"""The transport over NIXL: the sender writes to the receiver's memory directly (one-sided)."""
