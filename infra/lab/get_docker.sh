#!/usr/bin/env bash
# Installs what the tests with real containers need, where this user may: Debian's docker.io and debootstrap.
# Then makes their base image, for later runs as well. The argument is the Python of Berth's environment.
# It never fails; its last line says whether those tests will run, and if not, why.
set -uo pipefail

missing() {
  local program
  for program in dockerd containerd runc docker debootstrap; do
    command -v "$program" >/dev/null || echo "$program"
  done
}

if [ -n "$(missing)" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing docker.io and debootstrap with apt-get"
  log=$(mktemp)
  # A package starts no service of its own: the tests start a daemon with a folder of its own.
  { timeout 120 apt-get update &&
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 300 \
      apt-get install --yes --no-install-recommends docker.io debootstrap; } >"$log" 2>&1 ||
    { echo "apt-get failed:"; tail -n 5 "$log"; }
  rm -f "$log"
fi

if [ -n "$(missing)" ]; then
  echo "REAL CONTAINERS: NOT TESTED, their tests will be skipped: not installed: $(missing | tr '\n' ' ')"
elif [ "$(id -u)" -ne 0 ]; then
  echo "REAL CONTAINERS: NOT TESTED, their tests will be skipped: a Docker daemon and debootstrap need root"
elif ! reason=$("${1:-python3}" -m infra.lab.worker_image --prepare 2>&1); then
  echo "REAL CONTAINERS: NOT TESTED, their tests will be skipped: $reason"
else
  echo "REAL CONTAINERS: tested, with $(dockerd --version)"
fi
