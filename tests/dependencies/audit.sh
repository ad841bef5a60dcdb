#!/usr/bin/env bash
# Look for known vulnerabilities of pinned versions: audit.sh PIP_AUDIT FILE [option of pip-audit...]
# Exits with 1 if some are known, with 2 and one line if that could not be found out.
set -euo pipefail

usage='usage: tests/dependencies/audit.sh PIP_AUDIT FILE [option of pip-audit...]'
program=${1:?$usage} pins=${2:?$usage}
options=("${@:3}")
work=$(mktemp -d "${TMPDIR:-/tmp}/txbox-audit-XXXXXX")
trap 'rm -rf "$work"' EXIT

# audit FILE: print what is known of its versions; return whether the service has answered for all of them.
audit() {
  "$program" --disable-pip --no-deps --strict --progress-spinner off --requirement "$1" "${options[@]}" \
    > "$work/known" 2> "$work/trouble" || [[ -s $work/known ]] \
    || { echo "$pins was not audited: $(tail -n 1 "$work/trouble" | sed 's/^ERROR:[^:]*://')" >&2; exit 2; }
}

# Some mirrors of a package index answer, but without what is known of vulnerabilities: then nothing would ever be found.
echo 'jinja2==2.4.1' > "$work/vulnerable"
audit "$work/vulnerable"
if [[ ! -s $work/known ]]; then
  echo "$pins was not audited: the service knows no vulnerability of jinja2 2.4.1, which has some" >&2
  exit 2
fi
audit "$pins"
if [[ -s $work/known ]]; then
  cat "$work/known"
  exit 1
fi
echo "no vulnerability is known of the versions in $pins"
