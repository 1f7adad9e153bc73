"""Contains what tests do with the served API: accounts, orders, webhooks, pages."""
