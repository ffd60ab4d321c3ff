"""Recipes: the TOML schema and the resolution of one type per tensor."""
