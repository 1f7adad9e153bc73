"""The REST API: routes, schemas, services. It imports infra, the protocol, workflow messages and names."""
