"""The router's APIs: gRPC, HTTP and the admin service. Other packages decide what happens."""
