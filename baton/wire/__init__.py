"""Converts protobuf messages from and to the values of `baton.api`."""
