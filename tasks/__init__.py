"""Luigi tasks: one per output shard and one per report; each calls the pipeline in a few lines."""
