"""What the client and those who compute for it say to each other, besides the tensors of the protocols."""
