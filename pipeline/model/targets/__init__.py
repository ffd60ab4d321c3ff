"""The tensors of each output file: GGUF name, shape, and the stored matrices each is made of."""
