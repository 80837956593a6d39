"""Attacks on what the nodes of a sharding plan see: run them before you trust a plan."""
