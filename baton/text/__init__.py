"""Conversion between text and tokens: tokenizer, templates, stop strings, grammars."""
