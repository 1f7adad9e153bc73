#!/bin/sh
# Creates or updates Temporal's two databases. Safe to repeat: existing databases are kept, `setup-schema`
# changes nothing on a database that has a version, `update-schema` applies only what is new.
set -eu
SQL_PASSWORD="$(cat /run/secrets/temporal_database_password)"
export SQL_PASSWORD
for kind in temporal visibility; do
  database=temporal
  [ "$kind" = visibility ] && database=temporal_visibility
  tool="temporal-sql-tool --plugin postgres12 --ep postgres --port 5432 --user temporal --db $database"
  $tool create --defaultdb postgres
  $tool setup-schema -v 0.0
  $tool update-schema -d "/etc/temporal/schema/postgresql/v12/$kind/versioned"
done
