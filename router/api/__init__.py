"""The router's interfaces: gRPC, HTTP and the admin service. The interfaces decide nothing."""
