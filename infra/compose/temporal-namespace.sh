#!/bin/sh
# Registers the namespace and the search attributes of workflows/names.py. Safe to repeat.
set -eu
until temporal operator cluster health >/dev/null 2>&1; do sleep 1; done

if ! temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1; then
  temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention 14d
fi

# A namespace that was just made is known to all parts of the server only after a moment.
until listed="$(temporal operator search-attribute list --namespace "$TEMPORAL_NAMESPACE")"; do sleep 1; done
for name in UserId State WorkerId Pool; do
  case "$listed" in
    *"$name "*) ;;
    *) temporal operator search-attribute create --namespace "$TEMPORAL_NAMESPACE" --name "$name" --type Keyword ;;
  esac
done
