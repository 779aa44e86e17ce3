"""Families of dense decoders that differ from Llama by options alone."""
