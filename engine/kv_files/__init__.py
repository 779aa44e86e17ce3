"""The file tier of the prefix cache: KV of ended requests in files, read back when needed."""
