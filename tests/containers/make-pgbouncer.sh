#!/usr/bin/env bash
# Gets a PgBouncer that is newer than this machine's, from the packages of a newer Debian; nothing is installed.
#
#   make-pgbouncer.sh [SUITE]     SUITE: a Debian release; trixie unless given
#
# Prints the program's path alone on standard output. The packages come from where apt gets its own on this machine:
# mirror and proxies are read from its configuration. The program runs with the C library that it was built for, so it
# lies in a folder with all that it needs.
set -euo pipefail

readonly PARENT=/var/lib/txbox-test-pgbouncer
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here

say() { printf 'make-pgbouncer: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# shellcheck disable=SC2317 # reached by the trap
cleanup() {
  if [[ -n ${scratch:-} ]]; then
    rm -rf --one-file-system "$scratch"
  fi
}

# The address from which apt gets this machine's own release.
mirror() {
  local own
  own=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
  apt-get indextargets --format "\$(RELEASE) \$(COMPONENT) \$(REPO_URI)" 'Created-By: Packages' \
    | awk -v suite="$own" '$1 == suite && $2 == "main" && !found {print $3; found = 1}'
}

# apt with lists of its own, and the belief that nothing is installed here: so it gets what is needed, and all of it.
apt() {
  apt-get -qq -o "Dir::State=$scratch/state" -o "Dir::State::status=$scratch/status" -o "Dir::Cache=$scratch/cache" \
    -o "Dir::Etc::SourceList=$scratch/sources.list" -o 'Dir::Etc::SourceParts=-' -o APT::Sandbox::User=root \
    -o APT::Install-Recommends=false -o Acquire::Languages=none "$@" >>"$scratch/log" 2>&1 </dev/null \
    || { tail -n 20 "$scratch/log" >&2; fail "apt-get $1 failed; the last lines of its log are above"; }
}

suite=${1:-trixie}
hash=$({ cat "$here/make-pgbouncer.sh"; printf '%s' "$suite"; } | sha256sum | cut -c 1-16)
readonly suite folder=$PARENT/$suite-$hash
readonly program=$folder/pgbouncer

if [[ ! -x $program ]]; then
  ((EUID == 0)) || fail "run this as root, for it writes to $PARENT; or install a PgBouncer that is new enough"
  [[ $(. /etc/os-release && printf '%s' "${ID:-}") == debian ]] \
    || fail "this system is no Debian, so its mirror has no $suite; install a PgBouncer that is new enough"
  address=$(mirror)
  [[ -n $address ]] || fail 'apt on this machine has no source with the main component of its own release'

  trap cleanup EXIT
  mkdir -p "$PARENT"
  scratch=$(mktemp -d)
  mkdir -p "$scratch"/state/lists/partial "$scratch"/cache/archives/partial "$scratch/root"
  touch "$scratch/status"
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' "$address" "$suite" \
    >"$scratch/sources.list"
  say "getting PgBouncer from the packages of $suite (some seconds)"
  apt update
  apt install --download-only --yes pgbouncer
  # Of the packages, those with the program and the libraries that it is linked with.
  find "$scratch/cache/archives" -maxdepth 1 \( -name 'lib*.deb' -o -name 'pgbouncer_*.deb' \) \
    -exec dpkg-deb --extract {} "$scratch/root" \;
  loader=$(find "$scratch/root" -name 'ld-linux*.so.*' -printf '%P\n' | head -n 1)
  libraries=$(find "$scratch/root" -name 'libevent*.so.*' -printf '%h\n' | head -n 1)
  [[ -n $loader && -n $libraries ]] || fail "the packages of $suite hold no PgBouncer that could be run"
  printf '#!/bin/sh\nexec "%s" --library-path "%s" "%s" "$@"\n' "$folder/$loader" \
    "$folder/${libraries#"$scratch/root/"}" "$folder/usr/sbin/pgbouncer" >"$scratch/root/pgbouncer"
  chmod 0755 "$scratch/root" "$scratch/root/pgbouncer"
  # Of two runs at once, the second finds the first one's.
  mv -T "$scratch/root" "$folder" 2>/dev/null || [[ -x $program ]] || fail "$folder cannot be made"
fi
printf '%s\n' "$program"
