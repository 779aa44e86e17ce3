"""The protocol of the KV hand-off between two nodes: messages, state machines, peers, digests."""
