#!/bin/sh
# Starts Postgres in the test image. Takes the environment of the official image: POSTGRES_USER,
# POSTGRES_PASSWORD and POSTGRES_DB; arguments are Postgres options, with or without a leading `postgres`.
#
# The server is started once. Its user is made by initdb and its database in single-user mode, so the line
# "database system is ready to accept connections" appears once, when the database can be used.
set -eu

: "${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD to the password of the superuser}"
user=${POSTGRES_USER:-postgres}
database=${POSTGRES_DB:-$user}

as_postgres() {
  setpriv --reuid=postgres --regid=postgres --init-groups -- "$@"
}

if [ "${1:-}" = postgres ]; then
  shift
fi

# A volume or tmpfs mounted over the data directory belongs to root until now.
install -d -o postgres -g postgres -m 0700 "$PGDATA"
install -d -o postgres -g postgres -m 0775 /run/postgresql

if [ ! -s "$PGDATA/PG_VERSION" ]; then
  secret=$(as_postgres mktemp)
  printf '%s\n' "$POSTGRES_PASSWORD" >"$secret"
  as_postgres initdb --pgdata="$PGDATA" --username="$user" --pwfile="$secret" --auth=scram-sha-256 \
    --encoding=UTF8 --locale=C.UTF-8 >/dev/null
  rm -f "$secret"
  if [ "$database" != postgres ]; then
    quoted=$(printf '%s' "$database" | sed 's/"/""/g')
    printf 'create database "%s"\n' "$quoted" \
      | as_postgres postgres --single -D "$PGDATA" -c exit_on_error=on -c log_min_messages=fatal postgres >/dev/null
  fi
  echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
fi

exec setpriv --reuid=postgres --regid=postgres --init-groups -- \
  postgres -D "$PGDATA" -c listen_addresses='*' "$@"
