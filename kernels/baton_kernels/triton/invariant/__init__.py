"""Kernels in which what a token gets does not depend on who is computed with it."""
