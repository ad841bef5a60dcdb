#!/usr/bin/env bash
# Makes a Postgres image from Debian's packages, for machines that reach no image registry.
#
#   make-image.sh [SUITE]     SUITE: a Debian or Ubuntu release; this machine's own unless given
#
# Prints the image's name, txbox-test-postgres:MAJOR, alone on standard output. An image made before from the
# same files and suite is taken as it is. The packages come from where apt gets them on this machine: mirror and
# proxies are read from its configuration.
set -euo pipefail

readonly REPOSITORY=txbox-test-postgres
readonly LABEL=txbox.test-postgres.source
readonly BUILD_LIMIT_S=900
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here

say() { printf 'make-image: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

os_release() { (
  # shellcheck source=/dev/null
  . /etc/os-release 2>/dev/null && printf '%s' "${!1:-}"
) || true; }

image_made_before() {
  docker image ls --filter "label=$LABEL=$source_hash" --format '{{.Repository}}:{{.Tag}}' \
    | awk -v repository="$REPOSITORY:" 'index($0, repository) == 1 && !found {print; found = 1}'
}

# The address that apt uses for the main component of suite $1; nothing where apt knows none.
mirror_of() {
  apt-get indextargets --format "\$(RELEASE) \$(COMPONENT) \$(REPO_URI)" 'Created-By: Packages' \
    | awk -v suite="$1" '$1 == suite && $2 == "main" && !found {print $3; found = 1}'
}

# Gives debootstrap's downloader the proxies that apt would use; apt's own settings win over the environment's.
export_proxies() {
  local host proxy scheme
  host=$(printf '%s' "$1" | sed -E 's,^[a-z+]+://([^/@]*@)?([^/:]+).*,\2,')
  for scheme in http https; do
    proxy=
    eval "$(apt-config shell proxy "Acquire::$scheme::Proxy")"
    eval "$(apt-config shell proxy "Acquire::$scheme::Proxy::$host")"
    case $proxy in
      '') ;;
      DIRECT) unset "${scheme}_proxy" ;;
      *) export "${scheme}_proxy=$proxy" ;;
    esac
  done
}

install_debootstrap() {
  say 'installing debootstrap'
  apt-get update -qq >&2 || fail 'apt-get update failed; its message is above'
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >>"$log" 2>&1 \
    || { tail -n 20 "$log" >&2; fail 'debootstrap cannot be installed; the last lines of the log are above'; }
}

# What a test server never opens: package lists, documentation, the just-in-time compiler (half of the whole).
slim() {
  local name
  for name in doc doc-base man info locale lintian bug; do
    rm -rf "${root:?}/usr/share/$name"
  done
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/debootstrap \
    "$root"/var/lib/postgresql/* "$root"/etc/postgresql/* "$root"/etc/apt/sources.list* "$root"/tmp/* \
    "$root"/usr/lib/postgresql/*/lib/bitcode "$root"/usr/lib/postgresql/*/lib/llvmjit* \
    "$root"/usr/lib/*/libLLVM* "$root"/usr/lib/llvm-* "$root"/usr/lib/*/libz3.so*
}

# shellcheck disable=SC2317 # reached by the trap
cleanup() {
  if [[ -n ${scratch:-} ]]; then
    rm -rf --one-file-system "$scratch"
  fi
}

suite=${1:-$(os_release VERSION_CODENAME)}
[[ -n $suite ]] || fail 'this system names no release in /etc/os-release; give one: make-image.sh bookworm'
source_hash=$({ cat "$here/make-image.sh" "$here/entrypoint.sh"; printf '%s' "$suite"; } | sha256sum | cut -c 1-32)
readonly suite source_hash

image=$(image_made_before)
if [[ -n $image ]]; then
  printf '%s\n' "$image"
  exit 0
fi

((EUID == 0)) || fail 'debootstrap makes device nodes and mounts: run this as root, or name an image that can be pulled'
command -v apt-get >/dev/null || fail 'this needs a system with apt-get (Debian, Ubuntu)'

# Two runs at once: the second waits here and then finds the image of the first.
exec 7>"/run/lock/$REPOSITORY.lock"
flock 7
image=$(image_made_before)
if [[ -n $image ]]; then
  printf '%s\n' "$image"
  exit 0
fi

trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
scratch=$(mktemp -d)
readonly log=$scratch/log root=$scratch/root
chmod 0755 "$scratch"

command -v debootstrap >/dev/null || install_debootstrap
mirror=$(mirror_of "$suite")
[[ -n $mirror ]] || mirror=$(mirror_of "$(os_release VERSION_CODENAME)")
[[ -n $mirror ]] || fail "apt on this machine has no source with the main component of $suite"
export_proxies "$mirror"

say "making an image from the packages of $suite (about a minute)"
# Namespaces of its own: whatever the packages start or mount ends with debootstrap, even if this is killed.
# Without the lock's descriptor: what is left running must not hold it.
timeout "$BUILD_LIMIT_S" unshare --mount --pid --fork --kill-child -- \
  debootstrap --variant=minbase --components=main --include=postgresql "$suite" "$root" "$mirror" \
  >"$log" 2>&1 7>&- </dev/null \
  || { tail -n 20 "$log" >&2; fail 'debootstrap failed; the last lines of its log are above'; }

major=$(find "$root/usr/lib/postgresql" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort -n | tail -n 1)
[[ $major =~ ^[0-9]+$ ]] || fail "the packages of $suite hold no Postgres"
slim
install -m 0755 "$here/entrypoint.sh" "$root/usr/local/bin/entrypoint.sh"

image=$REPOSITORY:$major
replaced=$(docker image ls --quiet --no-trunc "$image")
tar --directory "$root" --numeric-owner --one-file-system \
  --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' --create . \
  | docker import \
    --change "LABEL $LABEL=$source_hash" \
    --change "ENV PATH=/usr/lib/postgresql/$major/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    --change 'ENV LANG=C.UTF-8' \
    --change 'ENV PGDATA=/var/lib/postgresql/data' \
    --change 'VOLUME /var/lib/postgresql/data' \
    --change 'EXPOSE 5432' \
    --change 'ENTRYPOINT ["entrypoint.sh"]' \
    --change 'CMD ["postgres"]' \
    - "$image" >/dev/null
if [[ -n $replaced ]]; then
  docker image rm "$replaced" >/dev/null 2>&1 || true # a container may still use it
fi
printf '%s\n' "$image"
