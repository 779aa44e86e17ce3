"""Protobuf messages from and to the plain values of `baton.api`."""
