"""The engram tables: hash arithmetic, keys, and the check that tables fit their buckets."""
