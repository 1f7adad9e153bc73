"""PostgreSQL: users, sealed credentials, orders, worker sessions, audit. A file is one noun."""
