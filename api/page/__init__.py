"""Renders the operators' pages, and logs browsers in.

Not here: rules or data; pages read and act through the functions of the REST routes in the other
folders of `api`.
"""
