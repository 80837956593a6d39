"""The cleartext reference `plain`: its party, the same with every range checked, and its client."""
