"""Generated checkpoints in the released layout: small ones with weights, full-size ones without."""
