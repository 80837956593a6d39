"""Streams of random words: AES in counter mode on CPUs, ChaCha20 on GPUs."""
