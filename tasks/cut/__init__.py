"""Cutting experts: from finished GGUFs, from an importance matrix, from a checkpoint."""
