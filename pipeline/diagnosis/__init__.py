"""What a file is, what is wrong with it, and what mends it: from headers alone, for any maker's."""
