"""The router's admin service: what operators may ask, and what they may change."""
