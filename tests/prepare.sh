#!/usr/bin/env bash
# Installs the system packages that the tests need, where they are missing.
#   faketime (with libfaketime): the clock tests let the wall clock of a worker jump by an hour and a day.
#   openssl: makes the certificates of the tests that speak TLS.
#   redis-server: the tests start private ones, in folders of their own. The system's service is not needed:
#   it is neither started nor enabled, and one that runs already is left alone.
#   postgresql: as redis-server. Its package makes a cluster of its own, which is not started, either.
#   rabbitmq-server: as redis-server.
#   unshare (util-linux), mmdebstrap: start and fetch a RabbitMQ 4, in a root directory of its own below ~/.cache/ackbone
#   (ACKBONE_TEST_RABBITMQ_ROOT names another folder). It comes from the mirror that this machine's apt uses. Where that
#   has none, this script goes on, and the tests of RabbitMQ 4 fail and say so.
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

newest_rabbitmq=${ACKBONE_TEST_RABBITMQ_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/ackbone/rabbitmq-4}
newest_suite=forky
have_newest_rabbitmq() {
  [ -e "$newest_rabbitmq/usr/lib/rabbitmq/bin/rabbitmq-server" ]
}

missing=()
have_faketime || missing+=(faketime)
command -v openssl >/dev/null || missing+=(openssl)
have_redis || missing+=(redis-server)
have_postgres || missing+=(postgresql)
[ -e /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing+=(rabbitmq-server)
have_newest_rabbitmq || command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
[ ${#missing[@]} -eq 0 ] && have_newest_rabbitmq && exit 0

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

install_packages() {
  local had_epmd=
  if command -v epmd >/dev/null; then had_epmd=yes; fi
  echo "· apt-get install ${missing[*]}"
  apt update || refuse "apt-get update failed."
  hold_services || refuse "$policy, which keeps their services from starting, could not be written."
  apt install -y "${missing[@]}" >/dev/null || refuse "apt-get could not install them."
  release_services
  local service
  for service in redis-server postgresql rabbitmq-server; do
    if [[ " ${missing[*]} " == *" $service "* ]]; then
      # Not at the next boot, either.
      "${as_root[@]}" update-rc.d "$service" disable >/dev/null || refuse "Its service could not be disabled."
    fi
  done
  if [ -z "$had_epmd" ] && command -v epmd >/dev/null && [ -d /run/systemd/system ]; then
    # Erlang's, which comes with rabbitmq-server.
    "${as_root[@]}" systemctl --quiet disable epmd.service epmd.socket || refuse "epmd could not be disabled."
  fi
}

# A root directory of a newer Debian with RabbitMQ in it: its Erlang wants a newer libc than the machine's.
fetch_newest_rabbitmq() {
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror new=$newest_rabbitmq.new
  mirror() {
    apt-get indextargets --format '$(REPO_URI)' \
      'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' | head -n 1
  }
  mirror=$(mirror)
  if [ -z "$mirror" ]; then # a machine without package lists does not know whose its sources are
    apt update || return 1
    mirror=$(mirror)
  fi
  if [ -z "$mirror" ] || [ ! -e "$keyring" ]; then
    echo "apt has no source of Debian here." >&2
    return 1
  fi
  echo "· mmdebstrap $newest_suite $newest_rabbitmq"
  mkdir -p "$(dirname "$newest_rabbitmq")"
  "${as_root[@]}" rm -rf "$new"
  # A mirror that lags shows an expired date for a suite that moves; signatures are checked all the same.
  # Erlang waits for ever where it cannot resolve localhost.
  "${as_root[@]}" mmdebstrap --quiet --variant=apt --mode=root --include=rabbitmq-server \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --customize-hook='echo "127.0.0.1 localhost" > "$1/etc/hosts"' \
    "$newest_suite" "$new" "deb [signed-by=$keyring] $mirror $newest_suite main" || return 1
  "${as_root[@]}" mv -T "$new" "$newest_rabbitmq"
}

[ ${#missing[@]} -eq 0 ] || install_packages
have_newest_rabbitmq || fetch_newest_rabbitmq ||
  echo "RabbitMQ 4 could not be fetched into $newest_rabbitmq: the tests that need it will fail." >&2
have_faketime || refuse "They were installed, but libfaketime.so.1 is not where it was expected."
have_redis || refuse "They were installed, but there is no redis-server on the PATH."
have_postgres || refuse "They were installed, but there is no initdb below /usr/lib/postgresql."
[ -e /usr/lib/rabbitmq/bin/rabbitmq-server ] || refuse "They were installed, but there is no server in /usr/lib/rabbitmq."
