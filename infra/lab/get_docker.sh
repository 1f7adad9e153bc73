#!/usr/bin/env bash
# Installs what the tests with real containers need, where this user may: Debian's docker.io, debootstrap and
# iproute2, and Docker Compose from a newer suite of Debian (one program that needs only libc). Then makes their
# base image, for later runs as well. The argument is the Python of Berth's environment. It never fails; its
# last line says whether those tests will run, and if not, why.
set -uo pipefail

missing() {
  local program
  for program in dockerd containerd runc docker debootstrap ip; do
    command -v "$program" >/dev/null || echo "$program"
  done
}

if [ -n "$(missing)" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing docker.io, debootstrap and iproute2 with apt-get"
  log=$(mktemp)
  # A package starts no service of its own: the tests start a daemon with a folder of its own.
  { timeout 120 apt-get update &&
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 300 \
      apt-get install --yes --no-install-recommends docker.io debootstrap iproute2; } >"$log" 2>&1 ||
    { echo "apt-get failed:"; tail -n 5 "$log"; }
  rm -f "$log"
fi

# Into a folder where `docker` looks for plugins. apt gets lists of its own, so nothing else is ever upgraded.
get_compose() {
  local work site
  work=$(mktemp --directory) && chmod 755 "$work" && cd "$work" || return 1
  site=$(apt-get indextargets --format '$(ORIGIN) $(SITE)' 'Created-By: Packages' |
    awk '$1 == "Debian" {print $2; exit}')
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $COMPOSE_SUITE main" >sources.list
  local options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::lists=$work/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
    -o APT::Sandbox::User=root -o Acquire::Languages=none)
  mkdir -p lists/partial &&
    timeout 120 apt-get "${options[@]}" update &&
    timeout 120 apt-get "${options[@]}" download docker-compose &&
    dpkg-deb --extract docker-compose_*.deb . &&
    install -D -m 755 usr/libexec/docker/cli-plugins/docker-compose "$PLUGINS/docker-compose"
  local code=$?
  cd / && rm -rf "$work"
  return "$code"
}

COMPOSE_SUITE=forky # has Docker Compose 2.40; the suite of this machine may have 1.29, which is another program
PLUGINS=/usr/local/lib/docker/cli-plugins
if ! docker compose version >/dev/null 2>&1 && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing Docker Compose"
  log=$(mktemp)
  (get_compose) >"$log" 2>&1 || { echo "that failed:"; tail -n 5 "$log"; }
  rm -f "$log"
fi
docker compose version 2>/dev/null || echo "COMPOSE: NOT TESTED, Docker Compose cannot be installed here"

if [ -n "$(missing)" ]; then
  echo "REAL CONTAINERS: NOT TESTED, their tests will be skipped: not installed: $(missing | tr '\n' ' ')"
elif [ "$(id -u)" -ne 0 ]; then
  echo "REAL CONTAINERS: NOT TESTED, their tests will be skipped: a Docker daemon and debootstrap need root"
elif ! reason=$("${1:-python3}" -m infra.lab.worker_image --prepare 2>&1); then
  echo "REAL CONTAINERS: NOT TESTED, their tests will be skipped: $reason"
else
  echo "REAL CONTAINERS: tested, with $(dockerd --version)"
fi
