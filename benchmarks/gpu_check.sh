#!/usr/bin/env bash
# Checks and measures the Hopper kernels on the GPU of this machine: one call, under five minutes, no network needed
# where python3 has jax. Arguments go to gpu_check.py (--interpret: tiny shapes in the interpreter, on a CPU).
# PYTHON chooses the interpreter; without one that has jax, an environment is made beside the repository.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

has_jax() { "$1" -c 'import jax' >/dev/null 2>&1; }

python="${PYTHON:-python3}"
if ! has_jax "$python"; then
  echo "$python cannot import jax; making an environment in $root/.venv-gpu" >&2
  "$python" -m venv "$root/.venv-gpu"
  python="$root/.venv-gpu/bin/python"
  "$python" -m pip install --quiet 'jax[cuda13]>=0.10.2,<0.13'
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/benchmarks/gpu_check.py" "$@"
