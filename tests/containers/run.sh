#!/usr/bin/env bash
# Runs a command with a container engine that answers and a Postgres image that is on it.
#
#   run.sh COMMAND [ARGUMENT...]
#
# Sets for the command:
#   TXBOX_TEST_POSTGRES_IMAGE   as given (any tag of txbox-test-postgres: made here); else postgres:18 where it
#                               is here or can be pulled; else an image made from Debian's packages
#   TXBOX_TEST_PGBOUNCER        as given: a PgBouncer that knows max_prepared_statements (1.21 or newer); else this
#                               machine's, if it does; else one from a newer Debian's packages
#   DOCKER_HOST, TESTCONTAINERS_*   only where needed, see below
#
# The engine: the one that `docker info` finds. Where none answers, root on Debian or Ubuntu gets one: installed
# if missing, with its own socket and data, ports on 127.0.0.1 only, no firewall rules, no forwarding. Runs at the
# same time share it, and the last one to end stops it. Its images stay in /var/lib/txbox-test-engine.
set -euo pipefail

readonly DEFAULT_IMAGE=postgres:18
readonly BUILT_REPOSITORY=txbox-test-postgres
readonly PREPARES_SINCE=1.21
readonly ANSWER_LIMIT_S=10
readonly START_LIMIT_S=60
readonly STOP_LIMIT_S=30
readonly TRY_PULL_LIMIT_S=30
readonly NAMED_PULL_LIMIT_S=600
readonly STATE=/run/txbox-test-engine
readonly DATA=/var/lib/txbox-test-engine
readonly SOCKET=unix://$STATE/docker.sock
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
engine_is_ours=false
pulled=false

say() { printf 'test-containers: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# --- the engine --------------------------------------------------------------------------------------------------

engine_answers() {
  command -v docker >/dev/null && timeout "$ANSWER_LIMIT_S" docker info >/dev/null 2>&1
}

our_engine_answers() {
  command -v docker >/dev/null && DOCKER_HOST=$SOCKET timeout "$ANSWER_LIMIT_S" docker info >/dev/null 2>&1
}

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

install_engine() {
  command -v apt-get >/dev/null \
    || fail 'no container engine answers, and this is no Debian or Ubuntu where one could be installed: start one'
  say 'installing docker.io'
  local log
  log=$(mktemp)
  {
    # Newer releases ship the client as a package of its own.
    apt-get update -qq && apt_install docker.io && { command -v docker || apt_install docker-cli; }
  } >"$log" 2>&1 </dev/null 8>&- 9>&- || fail "no container engine answers, and docker.io cannot be installed: see $log"
  rm -f "$log"
}

# The engine's process, if it runs; a stale file may name a process of someone else.
engine_pid() {
  local pid
  pid=$(cat "$STATE/dockerd.pid" 2>/dev/null) || return 1
  [[ $(readlink "/proc/$pid/exe" 2>/dev/null) == */dockerd* ]] && printf '%s' "$pid"
}

start_engine() {
  local deadline=$((SECONDS + START_LIMIT_S)) pid
  say "starting dockerd (log: $STATE/dockerd.log)"
  [[ -e /sys/class/net/docker0 ]] || touch "$STATE/bridge-is-ours"
  # A session of its own: Ctrl-C in the terminal stops the tests first, and the engine by our hand.
  setsid dockerd --host "$SOCKET" --data-root "$DATA" --exec-root "$STATE/exec" --pidfile "$STATE/dockerd.pid" \
    --ip 127.0.0.1 --userland-proxy=true --iptables=false --ip-forward=false --ip-masq=false \
    >"$STATE/dockerd.log" 2>&1 </dev/null 8>&- 9>&- &
  pid=$!
  until our_engine_answers; do
    if ! kill -0 "$pid" 2>/dev/null || ((SECONDS >= deadline)); then
      tail -n 5 "$STATE/dockerd.log" >&2
      stop_engine
      fail "dockerd does not start; the last lines of its log are above, the rest is in $STATE/dockerd.log"
    fi
    sleep 0.2
  done
}

# The tests put real PgBouncers before the server; they need no more of them than the program.
ensure_pgbouncer() {
  [[ -x /usr/sbin/pgbouncer ]] || command -v pgbouncer >/dev/null && return
  ((EUID == 0)) && command -v apt-get >/dev/null || fail 'there is no pgbouncer, which the tests of poolers need: install it'
  say 'installing pgbouncer'
  local log
  log=$(mktemp)
  { apt-get update -qq && apt_install pgbouncer; } >"$log" 2>&1 </dev/null 8>&- 9>&- \
    || fail "pgbouncer cannot be installed: see $log"
  rm -f "$log"
}

choose_pgbouncer() {
  ensure_pgbouncer
  [[ -z ${TXBOX_TEST_PGBOUNCER:-} ]] || return 0
  local program version
  program=$(PATH=$PATH:/usr/sbin command -v pgbouncer)
  version=$("$program" --version | awk 'NR == 1 {print $2}')
  if [[ $(printf '%s\n' "$PREPARES_SINCE" "$version" | sort --version-sort | head -n 1) != "$PREPARES_SINCE" ]]; then
    if ! program=$("$here/make-pgbouncer.sh" 8>&- 9>&- </dev/null); then
      say "PgBouncer is $version here: tests that need $PREPARES_SINCE are SKIPPED, unless TXBOX_TEST_PGBOUNCER names one"
      return 0
    fi
  fi
  export TXBOX_TEST_PGBOUNCER=$program
}

stop_engine() {
  local deadline=$((SECONDS + STOP_LIMIT_S)) pid
  if our_engine_answers; then # what killed tests left behind
    DOCKER_HOST=$SOCKET docker ps --all --quiet \
      | DOCKER_HOST=$SOCKET xargs --no-run-if-empty docker rm --force --volumes >/dev/null 2>&1 || true
  fi
  if pid=$(engine_pid); then
    kill -TERM "$pid" 2>/dev/null || true
    while [[ $(engine_pid) == "$pid" ]]; do
      if ((SECONDS >= deadline)); then
        kill -KILL "$pid" 2>/dev/null || true
        break
      fi
      sleep 0.1
    done
  fi
  if [[ -e $STATE/bridge-is-ours ]]; then
    ip link delete docker0 2>/dev/null || true
  fi
  rm -rf "$STATE/exec" "$STATE/bridge-is-ours" "$STATE/docker.sock" "$STATE/dockerd.pid"
}

# Every run holds the file `users` shared; whoever gets it exclusively at its end was the last. Starting and
# stopping happen under the file `lock`, so no run can join an engine that another is about to stop:
#
#   run A   lock  users shared  start  unlock  tests ................ lock  users exclusive? no   unlock
#   run B                                    lock  users shared  join  unlock  tests ...  lock  yes  stop  unlock
join_engine() {
  mkdir -p "$STATE"
  exec 8>"$STATE/lock" 9>"$STATE/users"
  flock 8
  if ! command -v dockerd >/dev/null || ! command -v docker >/dev/null; then
    install_engine
    if engine_answers; then # the package's own service
      exec 8>&- 9>&-
      return
    fi
  fi
  flock --shared 9
  engine_is_ours=true
  our_engine_answers || start_engine
  flock --unlock 8
  export DOCKER_HOST=$SOCKET
  unset DOCKER_CONTEXT
}

# shellcheck disable=SC2317 # reached by the trap
leave_engine() {
  $engine_is_ours || return 0
  flock 8
  if flock --exclusive --nonblock 9; then
    say 'stopping dockerd'
    stop_engine
  fi
  exec 8>&- 9>&-
}

ensure_engine() {
  if engine_answers; then
    return
  fi
  [[ -z ${DOCKER_HOST:-} ]] || fail "no container engine answers at DOCKER_HOST=$DOCKER_HOST"
  ((EUID == 0)) || fail 'no container engine answers (docker info); start one, or run as root on Debian or Ubuntu'
  join_engine
}

# --- the image ---------------------------------------------------------------------------------------------------

is_here() { docker image inspect "$1" >/dev/null 2>&1; }

pull() {
  timeout "$2" docker pull --quiet "$1" >/dev/null 2>&1 8>&- 9>&- </dev/null && pulled=true
}

make_image() {
  "$here/make-image.sh" 8>&- 9>&- </dev/null \
    || fail 'no Postgres image can be made here; set TXBOX_TEST_POSTGRES_IMAGE to one that is here or can be pulled'
}

choose_image() {
  local image=${TXBOX_TEST_POSTGRES_IMAGE:-}
  if [[ $image == "$BUILT_REPOSITORY" || $image == "$BUILT_REPOSITORY":* ]]; then
    local made
    made=$(make_image)
    [[ $image == "$BUILT_REPOSITORY" || $image == "$made" ]] \
      || fail "TXBOX_TEST_POSTGRES_IMAGE=$image, but this system's packages make $made"
    image=$made
  elif [[ -n $image ]]; then
    is_here "$image" || say "pulling $image"
    is_here "$image" || pull "$image" "$NAMED_PULL_LIMIT_S" \
      || fail "TXBOX_TEST_POSTGRES_IMAGE=$image is not on this machine and cannot be pulled"
  else
    image=$DEFAULT_IMAGE
    is_here "$image" || pull "$image" "$TRY_PULL_LIMIT_S" || image=$(make_image)
  fi
  export TXBOX_TEST_POSTGRES_IMAGE=$image
}

# Testcontainers' own guesses are right for an engine that someone else runs. Ours has its ports on 127.0.0.1, and
# what the tests leave behind goes when it is stopped, so the reaper (Ryuk, an image of its own) has no work.
# Elsewhere the reaper stays on where its image is here or pulling works.
configure_testcontainers() {
  if $engine_is_ours; then
    export TESTCONTAINERS_CONNECTION_MODE=docker_host TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1
    export TESTCONTAINERS_RYUK_DISABLED=true
    unset TC_HOST
  elif [[ -z ${TESTCONTAINERS_RYUK_DISABLED:-} ]] && ! $pulled \
    && [[ -z $(docker image ls --quiet "${RYUK_CONTAINER_IMAGE:-testcontainers/ryuk}") ]]; then
    export TESTCONTAINERS_RYUK_DISABLED=true
  fi
}

(($# > 0)) || { echo "usage: ${0##*/} COMMAND [ARGUMENT...]" >&2; exit 2; }
trap leave_engine EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
ensure_engine
choose_pgbouncer
choose_image
configure_testcontainers
unset TXBOX_TEST_DATABASE_URL # it would win, and the container stand by unused
say "Postgres is $TXBOX_TEST_POSTGRES_IMAGE"
status=0
"$@" 8>&- 9>&- || status=$?
exit "$status"
