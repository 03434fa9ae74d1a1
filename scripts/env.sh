#!/usr/bin/env bash
# Prints the path of a virtual environment that holds what scripts/requirements/NAME.txt pins; builds it when needed.
# What NAME.nodeps.txt lists, when there is one, is added without its dependencies; NAME.after.sh, when there is one, is
# sourced last, with the new environment's folder as $1.
#
#   scripts/env.sh NAME        the shared one, ${WEIGHT_SYNC_CACHE:-~/.cache/weight_sync}/venvs/NAME-HASH
#   scripts/env.sh NAME DIR    a thin one for this checkout: the shared one's packages and this checkout, editable
#
# HASH covers the requirement files and the interpreter, so a changed pin gets a new environment and an unchanged one is
# never touched again. An environment counts only once its .complete file is there; builders of the same one queue on a
# lock for WEIGHT_SYNC_LOCK_TIMEOUT seconds (1800). PYTHON names the interpreter (default: the first 3.11 or newer).
set -euo pipefail

die() { echo "env.sh: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    # pyenv leaves shims of interpreters that do not run, and Debian splits venv off: only running it tells
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer with venv and pip runs as '${PYTHON:-python3.11, python3.12, python3.13 or python3}';" \
    "install one (Debian: python3-venv too) or name it with PYTHON="
}

# Runs "$3 ..." unless file $2 holds text $1, under a lock beside it; writes the file when that succeeded.
once() {
  local want="$1" stamp="$2"
  local lock; lock="$(dirname "$stamp").lock"
  shift 2
  [[ -x "$(dirname "$stamp")/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$want" ]] && return
  mkdir -p "$(dirname "$lock")"
  (
    # pip inherits the lock: should this script be killed, nobody clears the folder while an orphan still writes into it
    flock -w "${WEIGHT_SYNC_LOCK_TIMEOUT:-1800}" 9 || die "another build still holds $lock; wait for it or end it"
    [[ -x "$(dirname "$stamp")/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$want" ]] && exit
    rm -f "$stamp"
    "$@" || exit
    printf '%s\n' "$want" >"$stamp.tmp"
    mv "$stamp.tmp" "$stamp"
  ) 9>"$lock"
}

build_shared() { # PYTHON VENV REQUIREMENTS REQUIREMENTS-WITHOUT-DEPENDENCIES LAST-STEP
  local pip=("$2/bin/python" -m pip install -qq --no-input --disable-pip-version-check --progress-bar off) torch
  echo "env.sh: building $2" >&2
  "$1" -m venv --clear "$2" || return
  # torch first and alone: as a mere dependency of something else it may come as a build for other hardware
  if torch="$(grep -E '^torch==' "$3")"; then "${pip[@]}" "$torch" >&2 || return; fi
  "${pip[@]}" -r "$3" >&2 || return
  [[ ! -f "$4" ]] || "${pip[@]}" --no-deps -r "$4" >&2 || return
  [[ ! -f "$5" ]] || . "$5" "$2"
}

build_thin() { # SHARED VENV ROOT
  local site script
  echo "env.sh: installing $3 into $2" >&2
  "$1/bin/python" -m venv --clear --without-pip "$2" || return
  site="$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return
  "$1/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    >"$site/shared.pth" || return
  for script in "$1"/bin/*; do # the shared one's commands, run by this interpreter
    [[ ! -f "$script" || -e "$2/bin/${script##*/}" || "$script" == */[Aa]ctivate* ]] && continue
    if grep -Iq . "$script"; then
      sed "1,2s|$1/bin/python[0-9.]*|$2/bin/python|" "$script" >"$2/bin/${script##*/}" && chmod +x "$2/bin/${script##*/}" || return
    else
      ln -s "$script" "$2/bin/" || return
    fi
  done
  "$2/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
    --no-deps --no-build-isolation --editable "$3" >&2
}

main() {
  local root name requirements bare after python key shared thin
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
  name="${1:?usage: scripts/env.sh NAME [DIR]}"
  requirements="$root/scripts/requirements/$name.txt"
  bare="${requirements%.txt}.nodeps.txt"
  after="${requirements%.txt}.after.sh"
  [[ -f "$requirements" ]] || die "no $requirements"
  python="$(find_python)"
  thin="${2:+$(realpath -m "$2")}"
  [[ ! -e "$thin" || -f "$thin/pyvenv.cfg" ]] || die "$thin exists and is no virtual environment; remove it or name another"
  key="$(
    {
      cat "$requirements"
      for extra in "$bare" "$after"; do [[ ! -f "$extra" ]] || cat "$extra"; done
      "$python" -c 'import platform, sys; print(sys.version, sys.base_prefix, platform.machine())'
    } | sha256sum
  )"
  key="${key:0:16}"
  shared="$(realpath -m "${WEIGHT_SYNC_CACHE:-$HOME/.cache/weight_sync}/venvs/$name-$key")"
  once "$key" "$shared/.complete" build_shared "$python" "$shared" "$requirements" "$bare" "$after" || die "$shared could not be built"
  [[ -n "$thin" ]] || { echo "$shared"; return; }
  once "$shared $root $(sha256sum <"$root/pyproject.toml")" "$thin/.complete" build_thin "$shared" "$thin" "$root" ||
    die "$thin could not be built"
  echo "$thin"
}

main "$@"
