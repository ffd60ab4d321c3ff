"""What a loader of each layout demands of a file, stated apart from what we write."""
