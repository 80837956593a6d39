"""The user's side: the model object, its links to parties and nodes, and what it holds of state that lives there."""
