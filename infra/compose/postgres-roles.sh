#!/bin/sh
# Runs once, when PostgreSQL makes its data folder: a role for Berth with its database, and a role for
# Temporal, which makes its own two databases (temporal-schema.sh). Passwords come from secret files.
set -eu
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\set berth `cat /run/secrets/berth_database_password`
\set temporal `cat /run/secrets/temporal_database_password`
CREATE ROLE berth LOGIN PASSWORD :'berth';
CREATE DATABASE berth OWNER berth;
CREATE ROLE temporal LOGIN CREATEDB PASSWORD :'temporal';
SQL
