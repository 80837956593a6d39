"""How parties exchange bytes."""
