"""A finished GGUF as a source: its tensors, its description, and what the file itself lacks."""
