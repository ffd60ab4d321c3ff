"""A budget in, a recipe out: types that lose the least within given limits of bytes."""
