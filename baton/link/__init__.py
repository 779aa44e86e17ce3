"""The link between router and node: its messages, both ends, and its wire format."""
