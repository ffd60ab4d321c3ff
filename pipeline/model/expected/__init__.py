"""Every tensor a checkpoint must have, from its config alone."""
