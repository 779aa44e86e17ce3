"""The joined nodes: what they report, what they can take, and which nodes reach each other."""
