#!/usr/bin/env bash
# Runs a command with a browser for the tests of pages.
#
#   run.sh COMMAND [ARGUMENT...]
#
# Sets for the command:
#   TXBOX_TEST_BROWSER   as given: a Chromium or Chrome; else this machine's. Where there is none, root on Debian or
#                        Ubuntu gets Debian's, with a font.
set -euo pipefail

say() { printf 'test-browser: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

find_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

install_browser() {
  ((EUID == 0)) && command -v apt-get >/dev/null \
    || fail 'there is no browser: install Chromium, or name one as TXBOX_TEST_BROWSER'
  say 'installing chromium'
  local log
  log=$(mktemp)
  {
    apt-get update -qq \
      && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
  } >"$log" 2>&1 </dev/null || fail "chromium cannot be installed: see $log"
  rm -f "$log"
}

(($# > 0)) || { echo "usage: ${0##*/} COMMAND [ARGUMENT...]" >&2; exit 2; }
if [[ -z ${TXBOX_TEST_BROWSER:-} ]]; then
  find_browser >/dev/null || install_browser
  TXBOX_TEST_BROWSER=$(find_browser) || fail 'chromium was installed, but is not on the PATH'
fi
export TXBOX_TEST_BROWSER
exec "$@"
