"""The native kernels' C library: built once per CPU and kept in a cache."""
