"""Follows one order that did not become final soon, until it is final or an operator has to look.

Not here: the usual way of an order, which Temporal does not see, and the checks themselves
(`activities/orders`).
"""
