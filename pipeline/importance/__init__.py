"""Importance matrices: which columns of a matrix matter most, measured on text."""
