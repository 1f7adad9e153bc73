"""PostgreSQL: tables, migrations, the bounded pool, and one file of queries for each noun."""
