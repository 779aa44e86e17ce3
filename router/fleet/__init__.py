"""The joined nodes: their reports, their capacity, and which nodes reach each other."""
