#!/usr/bin/env bash
# Installs the system packages that the tests need, where they are missing.
#   faketime (with libfaketime): the clock tests let the wall clock of a worker jump by an hour and a day.
#   openssl: makes the certificates of the tests that speak TLS.
#   redis-server: the tests start private ones, in folders of their own. The system's service is not needed:
#   it is neither started nor enabled, and one that runs already is left alone.
#   postgresql: as redis-server. Its package makes a cluster of its own, which is not started, either.
# With ACKBONE_TEST_REDIS_URL or ACKBONE_TEST_POSTGRES_URL that server is not installed: the tests use the one
# that is named, and skip what needs another.
set -euo pipefail

have_faketime() {
  compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null && command -v faketime >/dev/null
}

have_redis() {
  command -v redis-server >/dev/null || [ -n "${ACKBONE_TEST_REDIS_URL:-}" ]
}

have_postgres() {
  compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null ||
    [ -n "${ACKBONE_TEST_POSTGRES_URL:-}" ]
}

missing=()
have_faketime || missing+=(faketime)
command -v openssl >/dev/null || missing+=(openssl)
have_redis || missing+=(redis-server)
have_postgres || missing+=(postgresql)
[ ${#missing[@]} -eq 0 ] && exit 0

refuse() {
  echo "The tests need these system packages: ${missing[*]}. $1" >&2
  echo "Install them and try again, on Debian or Ubuntu: apt-get install ${missing[*]}" >&2
  exit 1
}

command -v apt-get >/dev/null || refuse "There is no apt-get here to install them with."
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || refuse "Installing them takes root or sudo."
  as_root=(sudo)
fi

apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@"
}

# A package asks this program whether it may start its service; 101 means no. One that is there stays as it is.
policy=/usr/sbin/policy-rc.d
policy_is_ours=
hold_services() {
  [ -e "$policy" ] && return
  policy_is_ours=yes
  trap release_services EXIT
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null &&
    "${as_root[@]}" chmod 755 "$policy"
}

release_services() {
  [ -n "$policy_is_ours" ] || return 0
  "${as_root[@]}" rm -f "$policy"
  policy_is_ours=
}

echo "· apt-get install ${missing[*]}"
apt update || refuse "apt-get update failed."
hold_services || refuse "$policy, which keeps their services from starting, could not be written."
apt install -y "${missing[@]}" >/dev/null || refuse "apt-get could not install them."
release_services
if [[ " ${missing[*]} " == *" redis-server "* ]]; then
  # Not at the next boot, either.
  "${as_root[@]}" update-rc.d redis-server disable >/dev/null || refuse "Its service could not be disabled."
fi
if [[ " ${missing[*]} " == *" postgresql "* ]]; then
  "${as_root[@]}" update-rc.d postgresql disable >/dev/null || refuse "Its service could not be disabled."
fi
have_faketime || refuse "They were installed, but libfaketime.so.1 is not where it was expected."
have_redis || refuse "They were installed, but there is no redis-server on the PATH."
have_postgres || refuse "They were installed, but there is no initdb below /usr/lib/postgresql."
