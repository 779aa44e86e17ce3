"""The native kernels' C library: carried by a wheel, or built once per CPU and kept in a cache."""
