"""Contains HTTP servers that jobs send to: webhooks, SMS and push providers, slow ones."""
