#!/usr/bin/env bash
# Gets promtool, which checks Prometheus's rules; nothing is installed, and no Prometheus is started.
#
#   get-promtool.sh FILE
#
# FILE becomes a link to this machine's promtool; where there is none, the program from Debian's or Ubuntu's package
# `prometheus`. apt reads lists of its own, so no rights are needed and nothing of the machine changes.
set -euo pipefail

say() { printf 'lint-monitoring: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# shellcheck disable=SC2317 # reached by the trap
cleanup() {
  if [[ -n ${scratch:-} ]]; then
    rm -rf --one-file-system "$scratch"
  fi
}

apt() {
  (cd "$scratch" && apt-get -qq -o "Dir::State=$scratch/state" -o Dir::State::status=/var/lib/dpkg/status \
    -o "Dir::Cache=$scratch/cache" -o Acquire::Languages=none -o APT::Sandbox::User= "$@") >>"$scratch/log" 2>&1 </dev/null \
    || { tail -n 20 "$scratch/log" >&2; fail "apt-get $1 failed; the last lines of its log are above; or install promtool"; }
}

(($# == 1)) || { echo "usage: ${0##*/} FILE" >&2; exit 2; }
readonly file=$1

if program=$(command -v promtool); then
  ln -sfn "$program" "$file"
  exit
fi
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null \
  || fail 'there is no promtool, and this is no Debian or Ubuntu to get it from: install Prometheus'
trap cleanup EXIT
scratch=$(mktemp -d)
mkdir -p "$scratch/state/lists/partial" "$scratch/cache/archives/partial"
say "getting promtool from the package prometheus (some seconds)"
apt update
apt download prometheus
dpkg-deb --fsys-tarfile "$scratch"/prometheus_*.deb | tar -x -C "$scratch" ./usr/bin/promtool
# Of two runs at once, each moves a whole program to its place.
mv "$scratch/usr/bin/promtool" "$file.$$"
mv "$file.$$" "$file"
