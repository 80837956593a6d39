"""Boolean circuits over words, without parties."""
