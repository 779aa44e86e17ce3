"""The router's admin service: what operators may ask and change."""
