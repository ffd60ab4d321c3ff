"""Every metadata key of a target file, and which of them loaders require."""
