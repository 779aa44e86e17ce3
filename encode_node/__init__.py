"""PROGRAM 4: the encode loop: encodes images and sends the encodings to prefill nodes."""
