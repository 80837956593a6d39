"""A party's or node's side: the command loop, the model on shares or on some rows, where its layers lie."""
