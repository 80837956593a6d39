#!/usr/bin/env bash
# From nothing to a tested checkout: environment, lint, types, layering and tests.
#   bash scripts/test.sh                  the gate: what every change has to pass
#   bash scripts/test.sh --all            everything: also the bars of speed and the newest versions of all dependencies
#   bash scripts/test.sh --slice COMMIT   a part of what the gate leaves out, which the commit's hash chooses
#   bash scripts/test.sh tests/approx -k silu   lint and types, then these tests (any arguments of pytest)
set -euo pipefail
source "$(dirname "$0")/environment.sh"
prepare_environment test
prepare_smollm2

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Where this is set, every process that tests start compiles all modules again.
unset PYTHONDONTWRITEBYTECODE
# Counted before OMP_NUM_THREADS is set, because nproc would answer with that.
workers="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
[ "$workers" -gt 4 ] && workers=4
# Every test process runs three parties as threads already; more threads only get in each other's way.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Hundreds of short-lived parties are threads of one test process: their freed memory stays in few heaps.
export MALLOC_ARENA_MAX=4
bin=.venv/bin

# Files keep their order (tests/conftest.py): sorted by their number of tests, the longest would come last, alone.
tests() { "$bin/python" -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder "$@"; }

if [ "${1:-}" = --slice ]; then
  slices=12
  commit="$(git rev-parse "$2" 2>/dev/null || date +%j)"  # outside a repository the day chooses
  part=$((16#${commit:0:8} % slices))
  echo "slice $part of $slices of the full run (commit $2)"
  tests --slice "$part/$slices"
  exit
fi
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
# Tests of the gate wait a third of their time, for time-outs and for processes to start; others may need much memory.
[ $# -eq 0 ] && workers=$((workers + 1))
tests "$@"
if [ "${1:-}" = --all ]; then
  "$bin/python" scripts/studies/check_bars.py
  bash scripts/newest.sh
fi
