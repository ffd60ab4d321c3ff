"""A checkpoint on disk: headers, index, ranged reads, FP8/FP4/E8M0 decoding. Knows no GGUF."""
