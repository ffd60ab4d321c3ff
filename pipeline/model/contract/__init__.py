"""What a loader of each form demands of a file, stated apart from what we write."""
