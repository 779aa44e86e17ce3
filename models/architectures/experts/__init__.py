"""Families of decoders with experts, of any attention but of latents."""
