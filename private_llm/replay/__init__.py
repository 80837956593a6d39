"""Steps that repeat, such as decoding a token, run as recorded programs instead of Python."""
