"""Keep lists: chosen from saliency, or recovered from a published checkpoint."""
