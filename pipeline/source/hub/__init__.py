"""A checkpoint on the Hugging Face hub: pinned, fetched by ranges, verified, resumable."""
