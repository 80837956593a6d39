"""Secret-sharing protocols: one interface, several trusts."""
