"""Training of what drafts: a head that learns a model's next tokens from its hidden states."""
