"""How bytes get from one node's memory into another's: NIXL, sockets, memory, with faults."""
