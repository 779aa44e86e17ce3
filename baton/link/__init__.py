"""The link between router and node: its words, both ends, and its wire format."""
