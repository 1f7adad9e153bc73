"""What crosses Valkey: keys, messages, errors, scripts, sealing. The only part other rooms import."""
