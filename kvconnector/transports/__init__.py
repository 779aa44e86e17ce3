"""Transports: copy bytes between nodes' memories by NIXL, sockets or memory; may inject faults."""
