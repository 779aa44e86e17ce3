"""Model families: each file has all knowledge of one family; `registry.py` lists the names."""
