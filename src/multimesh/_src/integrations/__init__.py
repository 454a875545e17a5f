"""Third-party libraries that hold or make our arrays; each is an optional extra."""
