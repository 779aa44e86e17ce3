"""Guards gRPC: accepts connections, limits their HTTP/2 frames, and passes frames on."""
