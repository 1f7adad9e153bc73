#!/bin/sh
# Runs once, when PostgreSQL makes its data folder: a role that owns Berth's database and its tables, with which only
# `prepare` logs in; one for Berth's servers, which uses them; and one for Temporal, which makes its own two databases
# (temporal-schema.sh). Passwords come from secret files.
set -eu
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\set owner `cat /run/secrets/berth_owner_password`
\set berth `cat /run/secrets/berth_database_password`
\set temporal `cat /run/secrets/temporal_database_password`
CREATE ROLE berth LOGIN PASSWORD :'berth';
CREATE ROLE berth_owner LOGIN PASSWORD :'owner';
CREATE DATABASE berth OWNER berth_owner;
CREATE ROLE temporal LOGIN CREATEDB PASSWORD :'temporal';
SQL
