"""Convert between text and tokens: tokenizers, chat templates, stop strings, grammars."""
