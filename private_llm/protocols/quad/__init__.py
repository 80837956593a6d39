"""Four parties, one of whom may cheat: the others notice before anything is opened, and stop."""
