"""The tokenizer as GGUF wants it, the engram's token map, the chat template."""
