"""The nodes that have joined: what they say, what they can take, and who reaches whom."""
