#!/usr/bin/env bash
# Gets Python 3.14 from the packages of Debian's next release; nothing is installed, and no rights are needed.
#
#   get-python.sh FOLDER
#
# FOLDER is filled with the Python and all libraries that it needs, the C library too, so it runs on an older Debian.
# Prints the program's path, alone on standard output; what an earlier run has put there is taken as it is. apt reads
# lists and sources of its own, from the mirror that it uses on this machine, so nothing of the machine changes.
set -euo pipefail

readonly VERSION=3.14
readonly SUITE=forky # the first release of Debian with this Python
readonly LIMIT_S=120 # of each call of apt
readonly KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf 'get-python: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
works() { "$program" -c 'import bz2, ctypes, lzma, sqlite3, ssl, venv, zlib' 2>/dev/null; }

# shellcheck disable=SC2317 # reached by the trap
cleanup() {
  if [[ -n ${scratch:-} ]]; then
    rm -rf --one-file-system "$scratch"
  fi
}

# As no package counts as installed, what is wanted comes with all that it needs.
apt() {
  timeout "$LIMIT_S" apt-get -qq -o "Dir::State=$scratch/state" -o "Dir::State::status=$scratch/status" \
    -o "Dir::Cache=$scratch/cache" -o "Dir::Etc::sourcelist=$scratch/sources.list" -o Dir::Etc::sourceparts=- \
    -o APT::Default-Release= -o Dir::Etc::preferences=- -o Dir::Etc::preferencesparts=- \
    -o APT::Update::Error-Mode=any -o Acquire::Languages=none -o APT::Sandbox::User= "$@" \
    >>"$scratch/log" 2>&1 </dev/null \
    || { tail -n 5 "$scratch/log" >&2; fail "apt-get $1 failed, or took more than $LIMIT_S s; see the lines above"; }
}

(($# == 1)) || { echo "usage: ${0##*/} FOLDER" >&2; exit 2; }
[[ $(type -P apt-get) && $(type -P dpkg-deb) && -r $KEYS ]] || fail 'this is no Debian to get it from'
folder=$(realpath -m "$1")
readonly folder program=$folder/usr/bin/python$VERSION
[[ ! -e $folder || -e $program ]] || fail "$folder is in the way: it has no Python of an earlier run"
if works; then
  echo "$program"
  exit
fi
release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
mirror=$(apt-get update --print-uris | sed -n "s,^'\(.*\)/dists/$release/InRelease'.*,\1,p" | head -n 1 || true)
[[ -n $mirror ]] || fail "apt on this machine has no source of $release"

trap cleanup EXIT
trap 'exit 130' INT
mkdir -p "$(dirname "$folder")"
scratch=$(mktemp -d "$folder.XXXXXX") # beside it, so that it is moved as a whole
mkdir -p "$scratch/state/lists/partial" "$scratch/cache/archives/partial" "$scratch/tree"
touch "$scratch/status"
echo "deb [signed-by=$KEYS] $mirror $SUITE main" >"$scratch/sources.list"
say "getting Python $VERSION from the packages of $SUITE (some seconds)"
apt update
apt install --yes --no-install-recommends --download-only "python$VERSION" patchelf
for package in "$scratch"/cache/archives/*.deb; do
  dpkg-deb --extract "$package" "$scratch/tree"
done

# The program is told where its C library and loader will be; its children get nothing of it, as with LD_LIBRARY_PATH.
loader=$(echo "$scratch"/tree/usr/lib/*/ld*.so.*)
[[ -e $loader ]] || fail "the packages of $SUITE have no loader where it was looked for"
libraries=$(dirname "$loader")
patch() {
  "$loader" --library-path "$libraries" "$scratch/tree/usr/bin/patchelf" "$@" "$scratch/tree/usr/bin/python$VERSION"
}
# In this order, and not at once, or the program crashes. An old-style path is also for what packages of Python load.
patch --force-rpath --set-rpath "$folder${libraries#"$scratch/tree"}"
patch --set-interpreter "$folder${loader#"$scratch/tree"}"
rm -rf --one-file-system "$folder"
mv --no-target-directory "$scratch/tree" "$folder"
works || fail "the Python of $SUITE does not run here: $("$program" -V 2>&1 || true)"
echo "$program"
