"""The router's interfaces: gRPC, HTTP and the admin service. They decide nothing."""
