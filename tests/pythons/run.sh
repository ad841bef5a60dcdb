#!/usr/bin/env bash
# Run tests with another Python than the one that make has, and with either SQLAlchemy: run.sh PYTHON ENVIRONMENT TESTS...
#
# Of the Pythons from 3.11 to 3.14, but make's own, the day decides which has its turn: of those that find-python.sh finds,
# and of 3.14, which get-python.sh gets where it is missing. If that fails, the next one has it.
# So for SQLAlchemy 2.0 and 2.1. PYTHON_TURN=3.13 and SQLALCHEMY_TURN=2.0 decide otherwise.
set -euo pipefail
source "$(dirname "$0")/find-python.sh"
make_python=$1
environment=$2
shift 2
own=$("$make_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
found=()
for version in 3.11 3.12 3.13 3.14; do
  if [ "$version" = "$own" ]; then continue; fi
  one=$(find_python "$version" "$make_python" || true)
  if [ -n "$one" ] || [ "$version" = 3.14 ]; then found+=("$version=$one"); fi
done
day=$((10#$(date +%j) / 2)) # each second day belongs to the oldest versions: `make test-versions`
sqlalchemy=${SQLALCHEMY_TURN:-2.$((day / ${#found[@]} % 2))}
python=
for ((turn = day; turn < day + ${#found[@]}; turn++)); do
  one=${found[$((turn % ${#found[@]}))]}
  version=${one%%=*} python=${one#*=}
  if [ "$version" != "${PYTHON_TURN:-$version}" ]; then
    python=
    continue
  fi
  echo "Python $version and SQLAlchemy $sqlalchemy have their turn, of Python $(printf '%s ' "${found[@]%%=*}")"
  if [ -z "$python" ]; then
    python=$("$(dirname "$0")/get-python.sh" "$environment-python$version") || true
  fi
  if [ -n "$python" ]; then break; fi
  echo "this machine has no Python $version; its turn is left out"
done
if [ -z "$python" ]; then
  if [ -n "${PYTHON_TURN:-}" ]; then
    echo "there is no Python $PYTHON_TURN for its turn" >&2
    exit 1
  fi
  exit 0
fi
"$python" -m venv --clear --without-pip "$environment"
grep -v -i '^sqlalchemy==' constraints.txt > "$environment/constraints.txt"
install=("$(dirname "$make_python")/uv" --quiet pip install --python "$environment/bin/python")
"${install[@]}" --offline --no-deps "$(grep '^pyspark==' constraints.txt)" || true # uv has built it already, and would again
"${install[@]}" \
  -c "$environment/constraints.txt" -e '.[all]' --group test "sqlalchemy==$sqlalchemy.*"
"$environment/bin/python" -P -m pytest "$@"
