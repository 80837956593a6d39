"""The user's side: the model object, its links to the parties, and what it holds of state that lives there."""
