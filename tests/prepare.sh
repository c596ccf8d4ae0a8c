#!/usr/bin/env bash
# Installs the system packages that the tests need, where they are missing.
#   faketime (with libfaketime): the clock tests let the wall clock of a worker jump by an hour and a day.
set -euo pipefail

have_faketime() {
  compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null && command -v faketime >/dev/null
}

missing=()
have_faketime || missing+=(faketime)
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

echo "· apt-get install ${missing[*]}"
apt update || refuse "apt-get update failed."
apt install -y "${missing[@]}" >/dev/null || refuse "apt-get could not install them."
have_faketime || refuse "They were installed, but libfaketime.so.1 is not where it was expected."
