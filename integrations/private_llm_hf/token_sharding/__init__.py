"""Token sharding of transformers' models: client, nodes, cuts and estimates."""
