"""Between text and tokens: tokenizer, templates, stop strings, grammars."""
