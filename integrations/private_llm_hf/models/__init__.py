"""What transformers' models are made of: facts of architectures, norms, attention, experts."""
