"""Load tests: plan or read requests, send them to a server, report its figures. No torch."""
