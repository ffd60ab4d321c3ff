"""What V4.1-Flash and V4-Flash are: tensors, roles, names, metadata, engram arithmetic, tokens."""
