#!/bin/sh
# Registers the namespace and the search attributes of workflows/names.py. Safe to repeat.
set -eu
# An API key switches TLS on in this command, unless TEMPORAL_TLS says otherwise.
TEMPORAL_API_KEY="$(cat "$TEMPORAL_API_KEY_FILE")"
export TEMPORAL_API_KEY TEMPORAL_TLS=false

# Tries a command for two minutes; then says what it said.
retry() {
  tries=60
  until said="$("$@" 2>&1)"; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || { echo "gave up: $*: $said" >&2; exit 1; }
    sleep 2
  done
}

retry temporal operator cluster health
if ! temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1; then
  temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$TEMPORAL_RETENTION"
else
  temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention "$TEMPORAL_RETENTION"
fi

# A namespace that was just made is known to all parts of the server only after a moment.
retry temporal operator search-attribute list --namespace "$TEMPORAL_NAMESPACE"
for name in UserId State WorkerId Pool; do
  case "$said" in
    *"$name "*) ;;
    *) temporal operator search-attribute create --namespace "$TEMPORAL_NAMESPACE" --name "$name" --type Keyword ;;
  esac
done
