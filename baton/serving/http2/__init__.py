"""What stands before gRPC: connections are accepted, their frames bounded, and then passed on."""
