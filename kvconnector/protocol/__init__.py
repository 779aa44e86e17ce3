"""The hand-off between two nodes: messages, sender, receiver, peers, digests."""
