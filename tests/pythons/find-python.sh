# shellcheck shell=bash
# To be sourced: where this machine has another Python.

# find_python VERSION MAKE_PYTHON: print the path of a Python of this version that can make environments, or fail. It is in
# the path, or beside make's, as with pyenv.
find_python() {
  local beside one
  beside=$(dirname "$("$2" -c 'import sys; print(sys.base_prefix)')")
  for one in "$(command -v "python$1" || true)" "$beside/$1".*/bin/python; do
    if [ -x "$one" ] && "$one" -c 'import venv' 2>/dev/null; then
      echo "$one"
      return
    fi
  done
  return 1
}
