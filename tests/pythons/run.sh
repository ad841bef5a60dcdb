#!/usr/bin/env bash
# Run tests with another Python than the one that make has, and with either SQLAlchemy: run.sh PYTHON ENVIRONMENT TESTS...
#
# Of the Pythons from 3.12 to 3.14 that are in the path, or beside make's, as with pyenv, the day decides which has its
# turn, and so for SQLAlchemy 2.0 and 2.1. PYTHON_TURN=3.13 and SQLALCHEMY_TURN=2.0 decide otherwise.
set -euo pipefail
beside=$(dirname "$("$1" -c 'import sys; print(sys.base_prefix)')")
environment=$2
shift 2
found=()
for version in 3.12 3.13 3.14; do
  for one in "$(command -v "python$version" || true)" "$beside/$version".*/bin/python; do
    if [ -x "$one" ] && "$one" -c 'import ensurepip, venv' 2>/dev/null; then
      found+=("$version=$one")
      break
    fi
  done
done
if [ ${#found[@]} = 0 ]; then
  echo "this machine has no other Python, from 3.12 to 3.14; its turn is left out"
  exit 0
fi
day=$((10#$(date +%j)))
turn=${found[$((day % ${#found[@]}))]}
for one in "${found[@]}"; do
  if [ "${one%%=*}" = "${PYTHON_TURN:-}" ]; then turn=$one; fi
done
sqlalchemy=${SQLALCHEMY_TURN:-2.$((day / ${#found[@]} % 2))}
version=${turn%%=*} python=${turn#*=}
echo "Python $version and SQLAlchemy $sqlalchemy have their turn, of Python $(printf '%s ' "${found[@]%%=*}")"
pip=("$environment/bin/python" -m pip --quiet --disable-pip-version-check)
"$python" -m venv --clear "$environment"
grep -v -i '^sqlalchemy==' constraints.txt > "$environment/constraints.txt"
"${pip[@]}" install -c "$environment/constraints.txt" --upgrade pip
"${pip[@]}" install -c "$environment/constraints.txt" -e '.[all]' --group test "sqlalchemy==$sqlalchemy.*"
"$environment/bin/python" -P -m pytest "$@"
