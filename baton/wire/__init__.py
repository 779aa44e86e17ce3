"""Convert values of `baton.api` to protobuf messages and back."""
