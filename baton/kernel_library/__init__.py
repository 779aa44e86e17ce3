"""The C library of native kernels as a file: built once per CPU, kept in a cache, found again."""
