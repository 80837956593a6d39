"""A party as a service: many clients at a time, several models, and passes that serve several requests at once."""
