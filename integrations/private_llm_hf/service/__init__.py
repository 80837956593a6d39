"""A party as a service: many clients at a time, several models, and batches that serve several requests at once."""
