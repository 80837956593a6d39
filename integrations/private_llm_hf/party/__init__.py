"""A party's side: the command loop, the model on shares, its cache and where its layers lie."""
