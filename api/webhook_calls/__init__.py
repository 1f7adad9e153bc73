"""Lists, exports and tests the calls that came to a webhook, and reports failures to its owner.

Not here: taking calls and placing their orders (`api/webhooks`).
"""
