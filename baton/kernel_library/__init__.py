"""The C library of native kernels: part of a wheel, or built once per CPU and kept in a cache."""
