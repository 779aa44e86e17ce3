"""Guard gRPC: accept connections, limit their HTTP/2 frames, and pass these on."""
