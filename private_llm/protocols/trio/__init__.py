"""Trio: three parties, semi-honest, honest majority (PIGEON)."""
