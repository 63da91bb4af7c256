"""Text around a model: templates, control tokens, ids to text, replies."""
