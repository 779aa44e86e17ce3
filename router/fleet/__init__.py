"""The joined nodes: their reports and their capacity, and which pairs of them are connected."""
