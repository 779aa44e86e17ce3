"""The router's gRPC services for clients and for nodes; protobuf stops here."""
