"""Token sharding (Cascade): plans, nodes and attacks. Statistical protection, no part of secret sharing."""
