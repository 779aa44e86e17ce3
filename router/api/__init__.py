"""What others call the router by: gRPC, HTTP and operators' calls. Decides nothing."""
