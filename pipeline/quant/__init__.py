"""GGUF block types and the quantizers that write them. Knows no model names."""
