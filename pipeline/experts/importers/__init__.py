"""Readers of saliency and keep lists in the forms that observers and pruners write, one a file."""
