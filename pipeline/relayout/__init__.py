"""A finished model in the other layout, without requantizing."""
