"""Experts cut out of finished files: bytes are copied, nothing is quantized again."""
