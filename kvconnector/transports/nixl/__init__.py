"""The transport over NIXL, with one-sided writes."""
