"""Which experts to keep: saliency tables, scores, keep lists and where they come from."""
