"""Token sharding of transformers' models: where they are cut, their attention calls, what nodes are asked."""
