"""Find or build the C library of native kernels: part of a wheel, or built once and cached."""
